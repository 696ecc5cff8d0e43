"""One element type for weights, activations and KV."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from via_sd.contract.graphs import LOGITS
from via_sd.errors import ExportError
from via_sd.export.passes.values import find_output


def float32_logits(graph: ir.Graph) -> ir.Value:
    """Let a `Cast` to float32 make the logits of `graph`, whatever its products work in; the new output."""
    native = find_output(graph, LOGITS.name)
    assert native is not None
    index = list(graph.outputs).index(native)
    native.name = f"{LOGITS.name}_native"
    cast = ir.node("Cast", [native], {"to": ir.DataType.FLOAT.value}, name=LOGITS.name)
    graph.append(cast)
    logits = cast.outputs[0]
    logits.name, logits.type, logits.shape = LOGITS.name, ir.TensorType(ir.DataType.FLOAT), native.shape
    graph.outputs[index] = logits
    return logits


class CastPass(ir.passes.InPlacePass):
    """Make every float32 weight, constant, input and output `dtype`, the logits excepted.

    Weights are converted when they are read, one at a time, so that a model need not fit in memory twice.

    Requires: a float32 graph.
    Ensures: every node but the last `Cast` before `logits` works in `dtype`. Reading a weight raises `ExportError` if a
    value is out of its range.
    """

    def __init__(self, dtype: ir.DataType) -> None:
        super().__init__()
        self.dtype = dtype

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        if self.dtype == ir.DataType.FLOAT:
            return ir.passes.PassResult(model, modified=False)
        graph = model.graph
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and tensor.dtype == ir.DataType.FLOAT:
                value.const_value = _converted(tensor, self.dtype, value.name or "")
                value.type = ir.TensorType(self.dtype)
        logits = find_output(graph, LOGITS.name)
        assert logits is not None
        for value in [*graph.inputs, *graph.outputs, *(v for node in graph for v in node.outputs)]:
            if value is not logits and value.dtype == ir.DataType.FLOAT:
                value.type = ir.TensorType(self.dtype)
        for node in graph:
            self._retype(node, logits)
        return ir.passes.PassResult(model, modified=True)

    def _retype(self, node: ir.Node, logits: ir.Value) -> None:
        """Make casts and constants inside the graph yield `dtype` where they yield float32."""
        if (
            node.op_type == "Cast"
            and node.outputs[0] is not logits
            and node.attributes["to"].as_int() == ir.DataType.FLOAT
        ):
            node.attributes["to"] = ir.AttrInt64("to", self.dtype.value)
        elif node.op_type in ("Constant", "ConstantOfShape") and "value" in node.attributes:
            tensor = node.attributes["value"].as_tensor()
            if tensor.dtype == ir.DataType.FLOAT:
                converted = _converted(tensor, self.dtype, node.outputs[0].name or "")
                node.attributes["value"] = ir.AttrTensor("value", converted)


def _converted(tensor: ir.TensorProtocol, dtype: ir.DataType, name: str) -> ir.TensorProtocol:
    def convert() -> ir.TensorProtocol:
        source = tensor.numpy()
        with np.errstate(over="ignore"):
            result = source.astype(dtype.numpy())
        if not np.isfinite(result.astype(np.float32)).all() and np.isfinite(source).all():
            raise ExportError(
                f"weight {name!r} reaches {float(np.abs(source).max()):.3g}, more than {dtype.name} holds; use bf16"
            )
        return ir.tensor(result, dtype=dtype, name=name)

    return ir.LazyTensor(convert, dtype=dtype, shape=ir.Shape(tensor.shape.numpy()), name=name)
