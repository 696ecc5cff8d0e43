"""Fuse an MLP's gate and up projections into one product: half the matrix products to launch, the same arithmetic."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass


class FuseGateUpPass(ir.passes.InPlacePass):
    """Replace two products of the same input with weights of the same shape by one product that is split afterwards.

    Requires: weights are initializers: of rank 2, [in, out], in `MatMul`; blocks, scales and zero points by output
    column in `MatMulNBits`.
    Ensures: the same values (every output column is computed as before).
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        order = {node: index for index, node in enumerate(graph)}
        pairs: list[list[ir.Node]] = []
        for hidden in {node.inputs[0]: None for node in graph if _weights(node)}:
            assert hidden is not None
            twins = [user for user in hidden.consumers() if _weights(user)]
            if len(twins) == 2 and _kind(twins[0]) == _kind(twins[1]):
                pairs.append(sorted(twins, key=order.__getitem__))
        for pair in pairs:
            _fuse(graph, pair)
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=bool(pairs))


def _weights(node: ir.Node) -> list[ir.TensorProtocol]:
    """The constants `node` multiplies by, if it is such a product and nothing else."""
    if node.op_type not in ("MatMul", "MatMulNBits"):
        return []
    tensors = [None if value is None else value.const_value for value in node.inputs[1:]]
    found = [tensor for tensor in tensors if tensor is not None]
    # Beyond zero points a quantised product may have an order of its inputs, and a bias.
    fits = len(found[0].shape) == 2 if node.op_type == "MatMul" and found else 2 <= len(tensors) <= 3
    return found if len(found) == len(tensors) and fits else []


def _kind(node: ir.Node) -> tuple[object, ...]:
    """What two products must have in common."""
    attributes = sorted((name, attribute.value) for name, attribute in node.attributes.items())
    return node.op_type, attributes, [tuple(tensor.shape.numpy()) for tensor in _weights(node)]


def _fuse(graph: ir.Graph, pair: list[ir.Node]) -> None:
    axis = 1 if pair[0].op_type == "MatMul" else 0  # of the output columns
    joined = [_join(graph, list(tensors), axis) for tensors in zip(*map(_weights, pair), strict=True)]
    attributes = {name: attribute.value for name, attribute in pair[0].attributes.items()}
    if "N" in attributes:
        attributes["N"] *= 2
    product = ir.node(
        pair[0].op_type, [pair[0].inputs[0], *joined], attributes, domain=pair[0].domain, name=f"{pair[0].name}+up"
    )
    product.outputs[0].name = f"{pair[0].outputs[0].name}+up"
    product.outputs[0].type = pair[0].outputs[0].type
    split = ir.node(
        "Split", [product.outputs[0]], {"axis": -1, "num_outputs": 2}, num_outputs=2, name=f"{pair[0].name}_split"
    )
    old = [node.outputs[0] for node in pair]
    ir.convenience.replace_nodes_and_values(graph, pair[0], pair, [product, split], old, list(split.outputs))


def _join(graph: ir.Graph, tensors: list[ir.TensorProtocol], axis: int) -> ir.Value:
    name = f"{tensors[0].name}+{tensors[1].name}"
    sizes = list(tensors[0].shape.numpy())
    sizes[axis] *= 2
    shape = ir.Shape(sizes)

    def join() -> ir.TensorProtocol:
        return ir.tensor(np.concatenate([t.numpy() for t in tensors], axis=axis), name=name)

    weight = ir.Value(
        name=name,
        type=ir.TensorType(tensors[0].dtype),
        shape=shape,
        const_value=ir.LazyTensor(join, dtype=tensors[0].dtype, shape=shape, name=name),
    )
    graph.register_initializer(weight)
    return weight
