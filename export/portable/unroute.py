"""Undo routing: replace every `If` of a routed graph by what full computes there."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from via_sd.contract.graphs import KEEP
from via_sd.export.passes.values import find_input


class UnroutePass(ir.passes.InPlacePass):
    """Splice the keeping branch of every `If` on `keep` into the main graph.

    Requires: nothing; a graph without the input `keep` is left as it is.
    Ensures: the full verifier without control flow and without `keep`; outputs have the names they had.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        keep = find_input(graph, KEEP.name)
        if keep is None:
            return ir.passes.PassResult(model, modified=False)
        flags = {keep, *(output for user in keep.consumers() for output in user.outputs)}
        for node in [node for node in graph if node.op_type == "If" and node.inputs[0] in flags]:
            _splice(graph, node)
        RemoveUnusedNodesPass()(model)
        graph.inputs.remove(keep)
        return ir.passes.PassResult(model, modified=True)


def _splice(graph: ir.Graph, branch: ir.Node) -> None:
    kept = branch.attributes["then_branch"].as_graph()
    made = list(kept.outputs)
    kept.outputs.clear()
    nodes = list(kept)
    kept.remove(nodes)
    graph.insert_before(branch, nodes)
    for outer, inner in zip(branch.outputs, made, strict=True):
        inner.name = outer.name
        inner.type, inner.shape = outer.type or inner.type, outer.shape or inner.shape
        outer.replace_all_uses_with(inner, replace_graph_outputs=True)
    _discard(branch.attributes["else_branch"].as_graph())
    graph.remove(branch, safe=True)


def _discard(branch: ir.Graph) -> None:
    """Take a branch apart: a node that is only out of the graph would still count as a reader of what it reads."""
    for inner in branch.subgraphs():
        _discard(inner)
    branch.outputs.clear()
    branch.remove(list(branch), safe=True)
