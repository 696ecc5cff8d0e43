"""The portable graph: a decoder in standard ONNX operators alone, as TensorRT and other compilers read it."""

from via_sd.export.portable.lowering import DTYPES, OPSET, portable_dtype, to_portable

__all__ = ["DTYPES", "OPSET", "portable_dtype", "to_portable"]
