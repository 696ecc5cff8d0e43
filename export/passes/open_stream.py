"""Open the residual stream of a decoder: read it between sublayers, and start from a stream that is given."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from via_sd.contract.open_stream import HIDDEN, RESUME, boundary_output
from via_sd.export.passes.branches import Substitutes, stream_node
from via_sd.export.passes.residual import find_sublayers
from via_sd.export.passes.route import RoutePass
from via_sd.export.passes.segments import Segment
from via_sd.export.passes.values import new_value


class OpenStreamPass(ir.passes.InPlacePass):
    """Route every sublayer, and give the residual stream an entry besides the embedding and exits at `boundaries`.

    Args:
        segments: every sublayer as a segment of its own, see `sublayer_segments`.
        boundaries: a boundary b is before sublayer b, and behind the last one for b = number of sublayers.
        substitutes: for branches of the segments other than keep and skip.

    Requires: a decoder graph `find_sublayers` understands, not yet routed.
    Ensures: an open graph, see `contract.open_stream`, with an output for each boundary.
    """

    def __init__(
        self, segments: Sequence[Segment], boundaries: Sequence[int], substitutes: Substitutes | None = None
    ) -> None:
        super().__init__()
        self.segments = segments
        self.boundaries = boundaries
        self.substitutes = substitutes

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        embedding = find_sublayers(graph)[0].before.residual
        RoutePass(self.segments, self.substitutes)(model)
        entry = _open_entry(graph, embedding)
        choices = [node for node in graph if node.op_type == "If" and node is not entry]
        for boundary in self.boundaries:
            before, parts = _stream_at(boundary, entry, choices)
            operator = "Add" if len(parts) > 1 else "Identity"
            stream = stream_node(operator, parts, boundary_output(boundary), embedding)
            graph.insert_after(before, stream)
            graph.outputs.append(stream.outputs[0])
        return ir.passes.PassResult(model, modified=True)


def _stream_at(boundary: int, entry: ir.Node, choices: Sequence[ir.Node]) -> tuple[ir.Node, list[ir.Value]]:
    """What makes the stream before sublayer `boundary`, and the values whose sum it is."""
    if boundary == 0:
        return entry, [entry.outputs[0]]
    before = choices[boundary - 1]
    residual = before.outputs[1] if boundary > 1 else entry.outputs[0]  # the first sublayer hands the embedding on
    return before, [residual, before.outputs[0]]


def _open_entry(graph: ir.Graph, embedding: ir.Value) -> ir.Node:
    """The `If` whose output is the given stream or the embedding; whatever read the embedding reads it."""
    users = list(embedding.uses())
    width = embedding.shape[-1] if embedding.shape is not None else None
    resume = new_value(RESUME)
    hidden = new_value(HIDDEN, **({"width": width} if isinstance(width, int) else {}))
    graph.inputs.extend([resume, hidden])
    given = stream_node("Identity", [hidden], "given_stream", embedding)
    embedded = stream_node("Identity", [embedding], "embedded_stream", embedding)
    entry = stream_node("If", [resume], "entry_stream", embedding)
    entry.attributes["then_branch"] = ir.AttrGraph(
        "then_branch", ir.Graph([], given.outputs, nodes=[given], name="resumed")
    )
    entry.attributes["else_branch"] = ir.AttrGraph(
        "else_branch", ir.Graph([], embedded.outputs, nodes=[embedded], name="from_embedding")
    )
    producer = embedding.producer()
    assert producer is not None
    graph.insert_after(producer, entry)
    for user, index in users:
        user.replace_input_with(index, entry.outputs[0])
    return entry
