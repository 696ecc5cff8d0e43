"""Fuse an MLP's gate and up projections into one product: half the matrix products to launch, the same arithmetic."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass


class FuseGateUpPass(ir.passes.InPlacePass):
    """Replace two products of the same input with weights of the same shape by one product that is split afterwards.

    Requires: weights are initializers of rank 2, [in, out].
    Ensures: the same values (every output column is computed as before).
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        order = {node: index for index, node in enumerate(graph)}
        pairs: list[list[ir.Node]] = []
        for hidden in {node.inputs[0]: None for node in graph if _weight(node) is not None}:
            assert hidden is not None
            twins = [user for user in hidden.consumers() if _weight(user) is not None]
            if len(twins) == 2 and len({_shape(twin) for twin in twins}) == 1:
                pairs.append(sorted(twins, key=order.__getitem__))
        for pair in pairs:
            _fuse(graph, pair)
        RemoveUnusedNodesPass()(model)
        for name in [name for name, value in graph.initializers.items() if not value.uses()]:
            del graph.initializers[name]
        return ir.passes.PassResult(model, modified=bool(pairs))


def _weight(node: ir.Node) -> ir.TensorProtocol | None:
    """The constant matrix `node` multiplies by, if it is such a product."""
    if node.op_type != "MatMul" or node.inputs[1] is None:
        return None
    tensor = node.inputs[1].const_value
    return tensor if tensor is not None and len(tensor.shape) == 2 else None


def _shape(node: ir.Node) -> tuple[int, int]:
    tensor = _weight(node)
    assert tensor is not None
    inner, outer = tensor.shape.numpy()
    return inner, outer


def _fuse(graph: ir.Graph, pair: list[ir.Node]) -> None:
    tensors = [tensor for node in pair if (tensor := _weight(node)) is not None]
    inner, outer = _shape(pair[0])
    name = f"{tensors[0].name}+{tensors[1].name}"
    shape = ir.Shape([inner, 2 * outer])

    def join() -> ir.TensorProtocol:
        return ir.tensor(np.concatenate([t.numpy() for t in tensors], axis=1), name=name)

    weight = ir.Value(
        name=name,
        type=ir.TensorType(tensors[0].dtype),
        shape=shape,
        const_value=ir.LazyTensor(join, dtype=tensors[0].dtype, shape=shape, name=name),
    )
    graph.register_initializer(weight)
    product = ir.node("MatMul", [pair[0].inputs[0], weight], name=f"{pair[0].name}+up")
    product.outputs[0].name = f"{pair[0].outputs[0].name}+up"
    product.outputs[0].type = pair[0].outputs[0].type
    split = ir.node(
        "Split", [product.outputs[0]], {"axis": -1, "num_outputs": 2}, num_outputs=2, name=f"{pair[0].name}_split"
    )
    old = [node.outputs[0] for node in pair]
    ir.convenience.replace_nodes_and_values(graph, pair[0], pair, [product, split], old, list(split.outputs))
