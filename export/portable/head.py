"""The LM head: float32 logits, from one table where head and embedding are tied."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from via_sd.contract.graphs import LOGITS, ROW_LOGITS
from via_sd.errors import UnsupportedModelError
from via_sd.export.passes.values import find_output, shape_of
from via_sd.export.portable.cast import float32_logits
from via_sd.export.portable.constants import add


class HeadPass(ir.passes.InPlacePass):
    """Give logits in float32, and store a tied table the way the head reads it.

    A table [vocab, hidden] that the head reads transposed would be copied in every step by a compiler to which weights
    are inputs, so it is stored as [hidden, vocab] and the embedding, which reads a few tokens of it, gathers columns.

    Requires: output `logits`.
    Ensures: output `logits` float32 [batch, rows, vocab]; no `FusedMatMul`.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        for node in [node for node in graph if node.op_type == "FusedMatMul"]:
            _untie_layout(graph, node)
        logits = find_output(graph, LOGITS.name)
        assert logits is not None
        vocabulary = logits.shape[-1] if logits.shape is not None else None
        out = float32_logits(graph)
        out.shape = shape_of(ROW_LOGITS, vocab=vocabulary if isinstance(vocabulary, int) else None)
        return ir.passes.PassResult(model, modified=True)


def _untie_layout(graph: ir.Graph, head: ir.Node) -> None:
    """`FusedMatMul(x, table [N, K], transB)` as `MatMul(x, table [K, N])`; lookups in the table gather its columns."""
    hidden, table = head.inputs
    assert hidden is not None
    assert table is not None
    fused = {name: attribute.value for name, attribute in head.attributes.items()}
    lookups = [user for user in table.consumers() if user is not head]
    tensor = table.const_value
    if fused != {"transB": 1} or tensor is None or any(not _is_lookup(user) for user in lookups):
        raise UnsupportedModelError(
            f"product {head.outputs[0].name!r} is fused with {fused} and shares its table with "
            f"{sorted({user.op_type for user in lookups})}; wanted a transposed table shared with embeddings alone"
        )
    table.const_value = _transposed(tensor)
    table.shape = ir.Shape(table.const_value.shape.numpy())
    product = ir.node("MatMul", [hidden, table], name=head.name or "lm_head")
    ir.convenience.replace_nodes_and_values(graph, head, [head], [product], [head.outputs[0]], [product.outputs[0]])
    for lookup in lookups:
        nodes: list[ir.Node] = []
        name = lookup.name or "embedding"
        columns = add(nodes, "Gather", [table, lookup.inputs[1]], f"{name}_columns", axis=1)
        rows = add(nodes, "Transpose", [columns], f"{name}_rows", perm=[1, 2, 0])
        ir.convenience.replace_nodes_and_values(graph, lookup, [lookup], nodes, [lookup.outputs[0]], [rows])


def _is_lookup(node: ir.Node) -> bool:
    axis = node.attributes.get("axis")
    return node.op_type == "Gather" and (axis is None or axis.as_int() == 0)


def _transposed(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    rows, columns = tensor.shape.numpy()

    def transpose() -> ir.TensorProtocol:
        return ir.tensor(np.ascontiguousarray(tensor.numpy().T), dtype=tensor.dtype, name=tensor.name)

    return ir.LazyTensor(transpose, dtype=tensor.dtype, shape=ir.Shape([columns, rows]), name=tensor.name)
