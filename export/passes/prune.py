"""Prune: leave of the decoder what a mask's tier computes (the slim-verifier as a graph of its own)."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from via_sd.export.passes.branches import Body, Branches, Substitutes
from via_sd.export.passes.segments import KEPT, tier_branches
from via_sd.masks import Mask


class PrunePass(ir.passes.InPlacePass):
    """Put in the place of every sublayer, and of the LM head, the branch that `mask` takes.

    Requires: a decoder graph `find_sublayers` understands, with as many layers as the mask; `substitutes` for every
    state of the mask but keep and skip.
    Ensures: kept sublayers compute exactly what they computed, and quantised ones what they compute in their variant,
    on the residual stream that the branches before them leave; sublayers that do not run are gone with their weights
    and their KV inputs and outputs; KV names keep their original layer index.
    """

    def __init__(self, mask: Mask, substitutes: Substitutes | None = None) -> None:
        super().__init__()
        self.mask = mask
        self.substitutes = substitutes or Substitutes()

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        branches = Branches(graph, self.substitutes)
        taken = tier_branches(self.mask)
        count = len(branches.sublayers)
        if len(taken) != count + 1:
            raise ValueError(f"the mask has {len(taken) - 1} sublayers, the graph {count}")
        for run in reversed([*runs(taken[:count]), range(count, count + 1)]):
            branch = taken[run.start]
            if branch != KEPT:
                replaced = branches.body(run.start, run.stop, KEPT)
                _replace(graph, replaced, branches.body(run.start, run.stop, branch))
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified={*taken} != {KEPT})


def runs(values: Sequence[object]) -> list[range]:
    """Maximal ranges of equal neighbours in `values`."""
    starts = [i for i in range(len(values)) if i == 0 or values[i] != values[i - 1]]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(values)], strict=True)]


def _replace(graph: ir.Graph, old: Body, new: Body) -> None:
    """Let whatever reads what `old` makes read what `new` makes; KV that is handed on leaves the graph."""
    for weight in new.weights:
        graph.register_initializer(weight)
    graph.insert_after(old.nodes[-1], new.nodes)
    for made, successor in zip(old.leaving, new.leaving, strict=True):
        if made.is_graph_output() and successor.is_graph_input():
            graph.inputs.remove(successor)
            graph.outputs.remove(made)
        elif made.is_graph_output():
            successor.name, made.name = made.name, f"{made.name}_replaced"
            made.replace_all_uses_with(successor, replace_graph_outputs=True)
        elif made is not successor:
            # Readers inside a run that is left out read it too; they go with the run.
            made.replace_all_uses_with(successor)
