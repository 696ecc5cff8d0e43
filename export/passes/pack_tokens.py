"""Packed tokens: one pass takes tokens of several sequences, a different number of each.

Products, norms and the head do not care whose tokens they work on, so they get all of them in a row and nothing is
computed for padding. Only attention has to tell sequences apart: ONNX Runtime's takes a padded batch, each row with a
length and a past of its own, and leaves the padding alone.
"""

from __future__ import annotations

import onnx_ir as ir

from via_sd.contract.graphs import INPUT_IDS, PACKED_IDS, QUERY_LENGTHS, TO_PACKED, TO_PADDED
from via_sd.errors import UnsupportedModelError
from via_sd.export.passes import gqa
from via_sd.export.passes.values import find_input, new_value, shape_of

_PROJECTIONS = (gqa.Input.QUERY, gqa.Input.KEY, gqa.Input.VALUE)


class PackTokensPass(ir.passes.InPlacePass):
    """Gather the tokens of all sequences into a padded batch before each attention, and back behind it.

    Requires: a decoder graph whose operators, attention aside, treat every token alike: the first two dimensions of
    its activations are [batch, tokens].
    Ensures: input `input_ids` int64[1, tokens]; inputs `query_lengths`, `to_padded` and `to_packed`
    (`via_sd.contract.graphs`); every activation outside attention is [1, tokens, …].
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        lengths, to_padded, to_packed = (new_value(tensor) for tensor in (QUERY_LENGTHS, TO_PADDED, TO_PACKED))
        for node in gqa.attentions(graph):
            _pack(graph, node, lengths, to_padded, to_packed)
        graph.inputs.extend([lengths, to_padded, to_packed])
        tokens = find_input(graph, INPUT_IDS.name)
        if tokens is None:
            raise UnsupportedModelError(f"the graph takes no {INPUT_IDS.name!r}: it is no decoder")
        tokens.shape = shape_of(PACKED_IDS)
        return ir.passes.PassResult(model, modified=True)


def _pack(graph: ir.Graph, node: ir.Node, lengths: ir.Value, to_padded: ir.Value, to_packed: ir.Value) -> None:
    """Put one attention `node` between two gathers."""
    if gqa.given(node, gqa.Input.POSITION_IDS) or gqa.given(node, gqa.Input.ATTENTION_BIAS):
        raise UnsupportedModelError(
            f"attention {node.outputs[0].name!r} takes positions or a mask of its own: its sequences cannot be packed"
        )
    for projection in _PROJECTIONS:
        packed = gqa.given(node, projection)
        if packed is not None:
            padded = _gather(packed, to_padded, f"{packed.name}_padded")
            graph.insert_before(node, padded)
            node.replace_input_with(projection, padded.outputs[0])
    node.resize_inputs(max(len(node.inputs), gqa.Input.QUERY_LENGTHS + 1))
    node.replace_input_with(gqa.Input.QUERY_LENGTHS, lengths)
    attended = node.outputs[gqa.Output.ATTENTION]
    readers = list(attended.uses())
    packed_again = _gather(attended, to_packed, f"{attended.name}_packed")
    graph.insert_after(node, packed_again)
    for user, index in readers:
        user.replace_input_with(index, packed_again.outputs[0])


def _gather(source: ir.Value, index: ir.Value, name: str) -> ir.Node:
    node = ir.node("GatherND", [source, index], name=name)
    node.outputs[0].name = name
    node.outputs[0].type = source.type
    return node


class UnpackTokensPass(ir.passes.InPlacePass):
    """Undo `PackTokensPass`: attention reads and writes [batch, tokens] itself.

    Requires: a graph as `PackTokensPass` leaves it, not routed.
    Ensures: no `query_lengths`, `to_padded` or `to_packed`; `input_ids` int64[batch, tokens].
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        lengths, to_padded, to_packed = (
            find_input(graph, tensor.name) for tensor in (QUERY_LENGTHS, TO_PADDED, TO_PACKED)
        )
        tokens = find_input(graph, INPUT_IDS.name)
        if lengths is None or to_padded is None or to_packed is None or tokens is None:
            raise UnsupportedModelError("the graph's tokens are not packed; wanted a decoder as an export leaves it")
        for node in gqa.attentions(graph):
            node.replace_input_with(gqa.Input.QUERY_LENGTHS, None)
        for gather in [*to_padded.consumers(), *to_packed.consumers()]:
            source = gather.inputs[0]
            assert source is not None
            gather.outputs[0].replace_all_uses_with(source)
            graph.remove(gather, safe=True)
        for value in (lengths, to_padded, to_packed):
            graph.inputs.remove(value)
        tokens.shape = shape_of(INPUT_IDS)
        return ir.passes.PassResult(model, modified=True)
