"""Route: one graph for every tier; where tiers differ, the input `keep` chooses what is computed.

One session over this graph holds one copy of the weights, packed once, and is full, slim and mask drafter at once:
sharing weights between sessions costs memory or speed in ONNX Runtime, an untaken branch costs neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import onnx_ir as ir

from via_sd.contract.graphs import KEEP
from via_sd.export.passes.branches import Body, Branches, Substitutes
from via_sd.export.passes.segments import KEPT, Segment
from via_sd.export.passes.values import new_value


class RoutePass(ir.passes.InPlacePass):
    """Put every segment inside `If`s that choose its branch by the input `keep`.

    Two branches are one `If`; of more, each further one is an `If` in the else branch of the one before.

    Requires: a decoder graph `find_sublayers` understands; `substitutes` for the branches of the segments.
    Ensures: a new input `keep`, bool[one less than branches, summed over segments]; with all true the graph computes
    what it computed, with `keep_vector(mask, …)` what `PrunePass(mask)` leaves, and the KV buffers of layers that do
    not run stay as they were.

    Weights that a branch of an `If` inside an `If` reads lie in that branch's graph, all others in the main one. ONNX
    Runtime (1.32) packs a constant for its kernel where it lies in the kernel's own graph or one level above, and of
    those that it has packed it lets go only where they lie in the main graph.
    """

    def __init__(self, segments: Sequence[Segment], substitutes: Substitutes | None = None) -> None:
        super().__init__()
        self.segments = segments
        self.substitutes = substitutes or Substitutes()

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        branches = Branches(graph, self.substitutes)
        if not self.segments:
            return ir.passes.PassResult(model, modified=False)
        counts = [len(segment.branches) - 1 for segment in self.segments]
        flags = iter(reversed(_flags(graph, sum(counts))))
        # Last first: wrapping a segment leaves the boundaries of earlier ones as they were found.
        for index, segment in reversed(list(enumerate(self.segments))):
            bodies = [branches.body(segment.start, segment.stop, branch) for branch in segment.branches]
            own = list(islice(flags, counts[index]))[::-1]
            _wrap(graph, dict(zip(segment.branches, bodies, strict=True)), own, f"segment_{index}")
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        ifs = sum(node.op_type == "If" for node in model.graph)
        if ifs != len(self.segments):
            raise ir.passes.PostconditionError(f"{ifs} If nodes for {len(self.segments)} segments")


def _flags(graph: ir.Graph, count: int) -> list[ir.Value]:
    """The new input `keep` as one value per flag, taken apart at the top of the graph."""
    keep = new_value(KEEP, flags=count)
    graph.inputs.append(keep)
    if count == 1:
        return [keep]
    split = ir.node("Split", [keep], {"axis": 0, "num_outputs": count}, num_outputs=count, name="keep_split")
    for index, output in enumerate(split.outputs):
        output.name = f"keep_{index}"
        output.dtype, output.shape = ir.DataType.BOOL, ir.Shape([1])
    graph.insert_before(graph[0], split)
    return list(split.outputs)


def _wrap(graph: ir.Graph, bodies: Mapping[str, Body], flags: list[ir.Value], name: str) -> None:
    kept = bodies[KEPT]
    inside = set(kept.nodes)
    # What the kept nodes do not make, the embedding as the residual, is the same on every branch.
    exchanged = [index for index, value in enumerate(kept.leaving) if value.producer() in inside]
    made = [kept.leaving[index] for index in exchanged]
    choice = ir.node("If", [flags[0]], num_outputs=len(made), name=name)
    graph.insert_after(kept.nodes[-1], choice)
    for value, outer in zip(made, choice.outputs, strict=True):
        outer.type, outer.shape = value.type, value.shape
        _hand_over(graph, value, outer, inside, name)
    graph.remove(kept.nodes)
    own = len(bodies) > 2
    parts = []
    for branch, body in bodies.items():
        for weight in [] if own else body.weights:
            graph.register_initializer(weight)
        leaving = [body.leaving[index] for index in exchanged]
        parts.append((branch, Body(body.nodes, leaving, body.weights if own else [])))
    _fill(choice, parts, flags, name)


def _fill(choice: ir.Node, bodies: list[tuple[str, Body]], flags: list[ir.Value], name: str) -> None:
    """Give the `If` node `choice` its two branches: the first of `bodies`, and the others, each behind its flag."""
    (branch, body), *others = bodies
    if len(others) == 1:
        otherwise = _graph(others[0][1], f"{name}_{others[0][0]}")
    else:
        inner = ir.node("If", [flags[1]], num_outputs=len(body.leaving), name=f"{name}_not_{branch}")
        for value, output in zip(body.leaving, inner.outputs, strict=True):
            output.name = f"{value.name}_not_{branch}"
            output.type, output.shape = value.type, value.shape
        _fill(inner, others, flags[1:], name)
        otherwise = ir.Graph([], inner.outputs, nodes=[inner], name=inner.name)
    choice.attributes["then_branch"] = ir.AttrGraph("then_branch", _graph(body, f"{name}_{branch}"))
    choice.attributes["else_branch"] = ir.AttrGraph("else_branch", otherwise)


def _graph(body: Body, name: str) -> ir.Graph:
    """The graph of one branch; what it hands on as it came is made its own by `Identity`."""
    inside = set(body.nodes)
    passed = {
        index: _identity(value, f"{name}_{index}")
        for index, value in enumerate(body.leaving)
        if value.producer() not in inside
    }
    outputs = [passed[index].outputs[0] if index in passed else value for index, value in enumerate(body.leaving)]
    return ir.Graph([], outputs, nodes=[*body.nodes, *passed.values()], initializers=body.weights, name=name)


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
