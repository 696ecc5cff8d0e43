"""One table for embedding and head, where an exporter derives the embedding's from the head's in the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from via_sd.export.passes.quantize import SHARES_BYTES_OF


class SharedTablePass(ir.passes.InPlacePass):
    """Store a table the way the embedding reads it, instead of deriving it in every session.

    A float head [hidden, vocab] that the embedding reads through `Transpose` is stored as [vocab, hidden], and the head
    transposes it. The blocks of a quantised head that `GatherBlockQuantized` reads through `Reshape` get a second name
    with the shape it wants, over the same bytes.

    Requires: shapes are initializers, not `Constant` nodes.
    Ensures: the same values; no embedding reads a constant through another node; no weight is stored twice.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        modified = False
        for node in list(graph):
            tensor = node.inputs[0].const_value if node.inputs and node.inputs[0] is not None else None
            readers = {user.op_type for user in node.outputs[0].consumers()}
            if tensor is None or len(tensor.shape) < 2:
                continue
            if node.op_type == "Transpose" and readers == {"Gather"} and len(tensor.shape) == 2:
                _turn(graph, node, tensor)
            elif node.op_type == "Reshape" and readers == {"GatherBlockQuantized"} and _joins_rows(node, tensor):
                _alias(graph, node, tensor)
            else:
                continue
            modified = True
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=modified)


def _turn(graph: ir.Graph, node: ir.Node, tensor: ir.TensorProtocol) -> None:
    """Store what `node` transposes the other way round; its other readers transpose it back."""
    stored = node.inputs[0]
    assert stored is not None
    table = _table(
        graph,
        f"{stored.name}.rows",
        tensor.dtype,
        tensor.shape.numpy()[::-1],
        lambda: np.ascontiguousarray(tensor.numpy().T),
    )
    node.outputs[0].replace_all_uses_with(table)
    for user, index in [use for use in stored.uses() if use.node is not node]:
        back = ir.node("Transpose", [table], {"perm": [1, 0]}, name=f"{user.name}_weight")
        back.outputs[0].name = f"{stored.name}.turned_back"
        back.outputs[0].type, back.outputs[0].shape = stored.type, stored.shape
        graph.insert_before(user, back)
        user.replace_input_with(index, back.outputs[0])


def _joins_rows(node: ir.Node, tensor: ir.TensorProtocol) -> bool:
    """Whether `node` reshapes to [first dimension, the rest]."""
    wanted = node.inputs[1].const_value if node.inputs[1] is not None else None
    rows = tensor.shape.numpy()[0]
    return wanted is not None and wanted.numpy().tolist() in ([rows, tensor.size // rows], [rows, -1])


def _alias(graph: ir.Graph, node: ir.Node, tensor: ir.TensorProtocol) -> None:
    """The blocks `node` reshapes under a second name, in the shape it gives them: [vocab, bytes of a row]."""
    stored = node.inputs[0]
    assert stored is not None
    rows = tensor.shape.numpy()[0]
    shape = (rows, tensor.size // rows)
    table = _table(graph, f"{stored.name}.rows", tensor.dtype, shape, lambda: tensor.numpy().reshape(shape))
    table.metadata_props[SHARES_BYTES_OF] = stored.name or ""
    node.outputs[0].replace_all_uses_with(table)


def _table(
    graph: ir.Graph, name: str, dtype: ir.DataType, shape: Sequence[int], make: Callable[[], np.ndarray]
) -> ir.Value:
    value = ir.Value(
        name=name,
        type=ir.TensorType(dtype),
        shape=ir.Shape(shape),
        const_value=ir.LazyTensor(lambda: ir.tensor(make(), name=name), dtype=dtype, shape=ir.Shape(shape), name=name),
    )
    graph.register_initializer(value)
    return value
