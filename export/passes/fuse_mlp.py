"""Fuse an MLP's gate and up projections into one product: half the weight-matrix launches, the same arithmetic."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass


class FuseGateUpPass(ir.passes.InPlacePass):
    """Replace two products of one input whose results meet in the MLP's elementwise product by one, split afterwards.

    Requires: weights are initializers of rank 2, [in, out].
    Ensures: the same values (every output column is computed as before).
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        fused = 0
        for node in list(graph):
            if node.graph is None or node.op_type != "MatMul" or not _constant(node):
                continue
            hidden = node.inputs[0]
            assert hidden is not None
            twins = [user for user in hidden.consumers() if user.op_type == "MatMul" and _constant(user)]
            if len(twins) == 2 and twins[0].inputs[1].shape == twins[1].inputs[1].shape:
                _fuse(graph, sorted(twins, key=list(graph).index))
                fused += 1
        RemoveUnusedNodesPass()(model)
        for name in [name for name, value in graph.initializers.items() if not value.uses()]:
            del graph.initializers[name]
        return ir.passes.PassResult(model, modified=fused > 0)


def _constant(node: ir.Node) -> bool:
    weight = node.inputs[1]
    return weight is not None and weight.const_value is not None and len(weight.const_value.shape) == 2


def _fuse(graph: ir.Graph, pair: list[ir.Node]) -> None:
    weights = [node.inputs[1] for node in pair]
    tensors = [w.const_value for w in weights]
    inner, outer = tensors[0].shape
    name = f"{weights[0].name}+{weights[1].name}"

    def join() -> ir.TensorProtocol:
        return ir.tensor(np.concatenate([t.numpy() for t in tensors], axis=1), name=name)

    weight = ir.Value(
        name=name,
        type=weights[0].type,
        shape=ir.Shape([inner, 2 * outer]),
        const_value=ir.LazyTensor(join, dtype=tensors[0].dtype, shape=ir.Shape([inner, 2 * outer]), name=name),
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
