"""Fused residual norms as the standard operators they stand for."""

from __future__ import annotations

import onnx_ir as ir

from via_sd.errors import UnsupportedModelError
from via_sd.export.portable.constants import add

_MEAN, _INVERSE_DEVIATION, _SUM = 1, 2, 3


class StandardNormPass(ir.passes.InPlacePass):
    """Replace skip norms by `Add` and a norm, and ONNX Runtime's own RMS norm by the standard one.

    Requires: no reader of a skip norm's mean and deviation outputs (only training reads them).
    Ensures: norms are `RMSNormalization` or `LayerNormalization`.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        modified = False
        for node in list(graph):
            if node.op_type in ("SkipSimplifiedLayerNormalization", "SkipLayerNormalization"):
                _expand(graph, node)
            elif node.op_type == "SimplifiedLayerNormalization":
                epsilon, axis = node.attributes["epsilon"].as_float(), node.attributes["axis"].as_int()
                nodes: list[ir.Node] = []
                out = add(nodes, "RMSNormalization", node.inputs[:2], f"{node.name}_rms", epsilon=epsilon, axis=axis)
                ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [node.outputs[0]], [out])
            else:
                continue
            modified = True
        return ir.passes.PassResult(model, modified=modified)


def _expand(graph: ir.Graph, node: ir.Node) -> None:
    for index in (_MEAN, _INVERSE_DEVIATION):
        if len(node.outputs) > index and node.outputs[index].uses():
            raise UnsupportedModelError(
                f"the statistics of norm {node.outputs[0].name!r} are used; no decoder does that"
            )
    simplified = node.op_type == "SkipSimplifiedLayerNormalization"
    stream, delta, scale = node.inputs[:3]
    shift = None if simplified or len(node.inputs) < 4 else node.inputs[3]
    bias_index = 3 if simplified else 4
    bias = node.inputs[bias_index] if len(node.inputs) > bias_index else None
    name = node.outputs[0].name or node.name or "norm"
    nodes: list[ir.Node] = []
    total = add(nodes, "Add", [stream, delta], f"{name}_sum")
    if bias is not None:
        total = add(nodes, "Add", [total, bias], f"{name}_sum_biased")
    epsilon = node.attributes["epsilon"].as_float()
    if simplified:
        out = add(nodes, "RMSNormalization", [total, scale], f"{name}_norm", epsilon=epsilon, axis=-1)
    else:
        inputs = [total, scale] if shift is None else [total, scale, shift]
        out = add(nodes, "LayerNormalization", inputs, f"{name}_norm", epsilon=epsilon, axis=-1)
    old, new = [node.outputs[0]], [out]
    if len(node.outputs) > _SUM:
        old.append(node.outputs[_SUM])
        new.append(total)
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, old, new)
