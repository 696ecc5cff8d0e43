"""Route: one graph for every tier, each run of skippable sublayers inside one `If` chosen by the input `keep`.

One session over this graph holds one copy of the weights, packed once, and is full, slim and mask drafter at once:
sharing weights between sessions costs memory or speed in ONNX Runtime, an untaken branch costs neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from via_sd.contract.graphs import KEEP
from via_sd.export.passes.prune import explicit_state
from via_sd.export.passes.residual import Sublayer, find_sublayers
from via_sd.export.passes.values import new_value
from via_sd.masks import Mask


@dataclass(frozen=True)
class Segment:
    """A run of neighbouring sublayers that every mask treats alike: entry `index` of the `keep` input.

    `start` and `stop` count sublayers in order of execution (2 * layer for attention, 2 * layer + 1 for the MLP).
    """

    start: int
    stop: int


def plan_segments(masks: list[Mask], num_sublayers: int, *, per_sublayer: bool = False) -> list[Segment]:
    """The runs of sublayers that some mask skips, cut wherever any mask changes its mind.

    With `per_sublayer` every sublayer is a segment of its own, which lets one graph run any mask (search).
    """
    if per_sublayer:
        return [Segment(i, i + 1) for i in range(num_sublayers)]
    votes = [tuple(mask.sublayers[i] for mask in masks) for i in range(num_sublayers)]
    starts = [i for i in range(num_sublayers) if i == 0 or votes[i] != votes[i - 1]]
    spans = zip(starts, [*starts[1:], num_sublayers], strict=True)
    return [Segment(a, b) for a, b in spans if not all(votes[a])]


def keep_vector(mask: Mask, segments: list[Segment]) -> list[bool]:
    """The `keep` input that makes the routed graph compute `mask`."""
    return [mask.sublayers[segment.start] for segment in segments]


class RoutePass(ir.passes.InPlacePass):
    """Put every segment inside an `If`; the else branch hands the residual stream and the KV buffers through.

    Requires: a decoder graph `find_sublayers` understands.
    Ensures: a new input `keep`, bool[len(segments)]; with all true the graph computes what it computed, with
    `keep_vector(mask, …)` what `PrunePass(mask)` leaves, and the KV buffers of skipped layers stay as they were.
    """

    def __init__(self, segments: list[Segment]) -> None:
        super().__init__()
        self.segments = segments

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        sublayers = find_sublayers(graph)
        if not self.segments:
            return ir.passes.PassResult(model, modified=False)
        keep = new_value(KEEP, segments=len(self.segments))
        graph.inputs.append(keep)
        flags = _split_flags(graph, keep, len(self.segments))
        # Last first: wrapping a segment leaves the boundaries of earlier ones as they were found.
        for index in reversed(range(len(self.segments))):
            segment = self.segments[index]
            _wrap(graph, sublayers[segment.start : segment.stop], flags[index], name=f"segment_{index}")
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        ifs = sum(node.op_type == "If" for node in model.graph)
        if ifs != len(self.segments):
            raise ir.passes.PostconditionError(f"{ifs} If nodes for {len(self.segments)} segments")


def _split_flags(graph: ir.Graph, keep: ir.Value, count: int) -> list[ir.Value]:
    """One scalar-like flag per segment, computed at the top of the graph."""
    if count == 1:
        return [keep]
    split = ir.node("Split", [keep], {"axis": 0, "num_outputs": count}, num_outputs=count, name="keep_split")
    for index, output in enumerate(split.outputs):
        output.name = f"keep_{index}"
        output.dtype, output.shape = ir.DataType.BOOL, ir.Shape([1])
    graph.insert_before(graph[0], split)
    return list(split.outputs)


def _wrap(graph: ir.Graph, run: list[Sublayer], flag: ir.Value, name: str) -> None:
    entry = explicit_state(graph, run[0])
    exit_ = run[-1].after
    assert entry.delta is not None
    assert exit_.delta is not None
    nodes = [node for sublayer in run for node in sublayer.nodes]
    inside = set(nodes)
    exchanged = [(entry.delta, exit_.delta), *(pair for sublayer in run for pair in sublayer.kv)]
    if exit_.residual.producer() in inside:  # else it is the embedding, the same on both branches
        exchanged.insert(1, (entry.residual, exit_.residual))

    branch = ir.node("If", [flag], num_outputs=len(exchanged), name=name)
    graph.insert_after(nodes[-1], branch)
    for (_, made), outer in zip(exchanged, branch.outputs, strict=True):
        outer.type, outer.shape = made.type, made.shape
        _hand_over(graph, made, outer, inside, name)

    graph.remove(nodes)
    then = ir.Graph([], [made for _, made in exchanged], nodes=nodes, name=f"{name}_keep")
    skips = [_identity(passed, f"{name}_skip_{index}") for index, (passed, _) in enumerate(exchanged)]
    otherwise = ir.Graph([], [node.outputs[0] for node in skips], nodes=skips, name=f"{name}_skip")
    branch.attributes["then_branch"] = ir.AttrGraph("then_branch", then)
    branch.attributes["else_branch"] = ir.AttrGraph("else_branch", otherwise)


def _hand_over(graph: ir.Graph, made: ir.Value, outer: ir.Value, inside: set[ir.Node], name: str) -> None:
    """Readers of `made` outside the segment, and the graph's outputs, get `outer` instead."""
    for user, index in list(made.uses()):
        if user not in inside:
            user.replace_input_with(index, outer)
    if made.is_graph_output():
        position = list(graph.outputs).index(made)
        outer.name, made.name = made.name, f"{made.name}_in_{name}"
        graph.outputs[position] = outer
    else:
        outer.name = f"{made.name}_after_{name}"


def _identity(value: ir.Value, name: str) -> ir.Node:
    node = ir.node("Identity", [value], name=name)
    node.outputs[0].name = name
    node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
    return node
