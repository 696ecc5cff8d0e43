"""The portable graph: a decoder in standard ONNX operators alone, as TensorRT and other compilers read it."""

from via_sd.export.portable.attention import CACHE_SLOTS, POSITION_IDS
from via_sd.export.portable.head import LOGIT_ROWS
from via_sd.export.portable.lowering import DTYPES, OPSET, portable_dtype, to_portable
from via_sd.export.portable.numbers import CANDIDATES, ROW_NUMBERS

__all__ = [
    "CACHE_SLOTS",
    "CANDIDATES",
    "DTYPES",
    "LOGIT_ROWS",
    "OPSET",
    "POSITION_IDS",
    "ROW_NUMBERS",
    "portable_dtype",
    "to_portable",
]
