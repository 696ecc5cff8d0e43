"""Prune: leave out the sublayers a mask skips (the slim-verifier as a graph of its own)."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from via_sd.export.passes.residual import State, Sublayer, find_sublayers
from via_sd.masks import Mask


class PrunePass(ir.passes.InPlacePass):
    """Remove every sublayer that `mask` skips, with its weights and its KV inputs and outputs.

    Requires: a decoder graph `find_sublayers` understands, with as many layers as the mask.
    Ensures: the kept sublayers compute exactly what they computed, on the residual stream that skipping leaves them;
    KV names keep their original layer index.
    """

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        sublayers = find_sublayers(graph)
        skipped = [not keep for keep in self.mask.sublayers]
        if len(skipped) != len(sublayers):
            raise ValueError(f"the mask has {len(skipped)} sublayers, the graph {len(sublayers)}")
        for run in runs(skipped):
            if skipped[run.start]:
                _bypass(graph, sublayers[run.start], sublayers[run.stop - 1])
        dropped = [pair for sub, skip in zip(sublayers, skipped, strict=True) if skip for pair in sub.kv]
        for past, present in dropped:
            graph.inputs.remove(past)
            graph.outputs.remove(present)
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=any(skipped))


def runs(flags: list[bool]) -> list[range]:
    """Maximal ranges of equal neighbours in `flags`."""
    starts = [i for i in range(len(flags)) if i == 0 or flags[i] != flags[i - 1]]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(flags)], strict=True)]


def _bypass(graph: ir.Graph, first: Sublayer, last: Sublayer) -> None:
    """Give whatever reads the state after `last` the state before `first` instead."""
    state = explicit_state(graph, first)
    assert last.after.delta is not None
    assert state.delta is not None
    last.after.delta.replace_all_uses_with(state.delta)
    # The residual has readers inside the bypassed run as well; they go with it.
    last.after.residual.replace_all_uses_with(state.residual)


def explicit_state(graph: ir.Graph, sublayer: Sublayer) -> State:
    """The state before `sublayer` as a pair; at the model's entry the missing delta is made, as exact zeros."""
    before = sublayer.before
    if before.delta is not None:
        return before
    zero = ir.node("Sub", [before.residual, before.residual], name="entry_delta")
    zero.outputs[0].name = "entry_delta"
    zero.outputs[0].type, zero.outputs[0].shape = before.residual.type, before.residual.shape
    graph.insert_before(sublayer.norm, zero)
    return State(before.residual, zero.outputs[0])
