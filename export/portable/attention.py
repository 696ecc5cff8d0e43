"""Standard attention over a cache of fixed size, in place of GroupQueryAttention.

The additive mask is made in the graph from `position_ids`. Anything shorter is wrong or refused somewhere: a causal
flag knows no offset in TensorRT, its parser drops `nonpad_kv_seqlen`, and a boolean mask as an input does not build.

Two choices here are for what a compiler makes of the graph; TensorRT's plans show it, and neither changes a value:

- A step looks at the first `visible` slots, as many as the caller says. Kernels read the cache through a copy in their
  own layout, so what that costs grows with the text and not with the capacity; and they copy a cache that is looked at
  whole once per query head, not once per KV head.
- The query carries the score's scale. A scale that is left to the attention is split between query and cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from via_sd.contract.graphs import CACHE_SLOTS, INPUT_IDS, LAST_POSITION, PARTS, POSITION_IDS, TOTAL_LENGTH
from via_sd.errors import UnsupportedModelError
from via_sd.export.passes import gqa
from via_sd.export.passes.values import find_input, new_value, shape_of
from via_sd.export.portable.constants import add, int64_constant, named_constant

#: What a score is lowered by where a token must not look: the lowest finite float16.
MASKED = -65504.0
#: Attributes of GroupQueryAttention that are lowered, and the values of others that change nothing.
_LOWERED = {"num_heads", "kv_num_heads", "scale", "softcap", "local_window_size", "do_rotary", "rotary_interleaved"}
_NEUTRAL = {
    "smooth_softmax": 0,
    "qk_output": 0,
    "k_quant_type": "NONE",
    "v_quant_type": "NONE",
    "kv_cache_bit_width": 0,
}
_SLOT_AXIS = 2  # of a cache


class AttentionPass(ir.passes.InPlacePass):
    """Replace every GroupQueryAttention by RotaryEmbedding, TensorScatter and Attention.

    Requires: every attention is a GroupQueryAttention whose attributes say what the model means (scale, window, soft
    cap, rotation), with the past KV as graph inputs and the present KV as graph outputs.
    Ensures: inputs `position_ids` and `cache_slots` instead of the step lengths; caches [batch, kv_heads, max_seq_len,
    head_dim] that are direct graph inputs and outputs; windows are part of the mask.
    """

    def __init__(self, max_seq_len: int) -> None:
        super().__init__()
        self.max_seq_len = max_seq_len

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        attentions = gqa.attentions(graph)
        if not attentions:
            raise UnsupportedModelError("the graph has no GroupQueryAttention; wanted a decoder as an export leaves it")
        shared = _Shared(graph)
        for index, node in enumerate(attentions):
            _lower(graph, node, shared, self.max_seq_len, f"attention_{index}")
        graph.insert_before(graph[0], shared.nodes)
        RemoveUnusedNodesPass()(model)
        for value in [v for v in graph.inputs if v.name in (LAST_POSITION.name, TOTAL_LENGTH.name)]:
            graph.inputs.remove(value)
        tokens = find_input(graph, INPUT_IDS.name)
        assert tokens is not None
        tokens.shape = shape_of(INPUT_IDS)
        return ir.passes.PassResult(model, modified=True)


@dataclass(frozen=True)
class _Geometry:
    """Head counts and head dimension of one attention."""

    heads: int
    kv_heads: int
    head_dim: int


class _Shared:
    """What every attention of a graph reads: where to write, how far to look, and a mask per window."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.positions, self.slots = new_value(POSITION_IDS), new_value(CACHE_SLOTS)
        graph.inputs.extend([self.positions, self.slots])
        self.nodes: list[ir.Node] = []
        self.write_index = add(self.nodes, "Gather", [self.positions, int64_constant(graph, 0)], "write_index", axis=1)
        self.visible = add(self.nodes, "Shape", [self.slots], "visible")
        self._query = add(self.nodes, "Unsqueeze", [self.positions, int64_constant(graph, [1, 3])], "query_position")
        self._masks: dict[int, ir.Value] = {}

    def mask(self, window: int) -> ir.Value:
        """Additive mask [batch, 1, tokens, visible].

        A query sees the last `window` positions, itself included; all of them if `window` is not positive.
        """
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int) -> ir.Value:
        graph, nodes = self.graph, self.nodes
        suffix = f"_window{window}" if window > 0 else ""
        seen = add(nodes, "LessOrEqual", [self.slots, self._query], f"seen{suffix}")
        if window > 0:
            oldest = add(nodes, "Sub", [self._query, int64_constant(graph, window)], f"before_window{suffix}")
            near = add(nodes, "Greater", [self.slots, oldest], f"in_window{suffix}")
            seen = add(nodes, "And", [seen, near], f"seen_in_window{suffix}")
        allowed = named_constant(graph, "mask_allowed", np.array(0, np.float32))
        masked = named_constant(graph, "mask_masked", np.array(MASKED, np.float32))
        return add(nodes, "Where", [seen, allowed, masked], f"attention_mask{suffix}")

    def look(self, nodes: list[ir.Node], cache: ir.Value, name: str) -> ir.Value:
        """The visible slots of `cache`."""
        start, axis = int64_constant(self.graph, [0]), int64_constant(self.graph, [_SLOT_AXIS])
        return add(nodes, "Slice", [cache, start, self.visible, axis], name)


def _lower(graph: ir.Graph, node: ir.Node, shared: _Shared, max_seq_len: int, name: str) -> None:
    _check(node)
    (past_key, present_key), (past_value, present_value) = gqa.kv_buffers(node)
    assert past_key is not None
    assert past_value is not None
    geometry = _geometry(node, past_key)
    for past, present in ((past_key, present_key), (past_value, present_value)):
        if not past.is_graph_input() or not present.is_graph_output():
            raise UnsupportedModelError(f"KV cache {past.name!r} is not a direct input and output of the graph")
        past.shape = ir.Shape(["batch", geometry.kv_heads, max_seq_len, geometry.head_dim])
        present.shape = past.shape
    nodes: list[ir.Node] = []
    query, key, value = _heads(graph, nodes, node, geometry, name)
    if gqa.number(node, "do_rotary", 0):
        query = _rotate(nodes, node, query, shared, geometry, f"{name}_query_rotated")
        key = _rotate(nodes, node, key, shared, geometry, f"{name}_key_rotated")
    written_key, written_value = (
        add(
            nodes, "TensorScatter", [past, update, shared.write_index], f"{name}_{part}", axis=_SLOT_AXIS, mode="linear"
        )
        for past, update, part in zip((past_key, past_value), (key, value), PARTS, strict=True)
    )
    scale = gqa.number(node, "scale", 0.0) or 1.0 / math.sqrt(geometry.head_dim)
    factor = named_constant(graph, f"attention_scale_{scale}", np.array(scale, np.float32))
    query = add(nodes, "Mul", [query, factor], f"{name}_query_scaled")
    window = int(gqa.number(node, "local_window_size", -1))
    inputs = [
        query,
        shared.look(nodes, written_key, f"{name}_key_visible"),
        shared.look(nodes, written_value, f"{name}_value_visible"),
        shared.mask(window if 0 < window < max_seq_len else -1),
    ]
    attributes = {"scale": 1.0}
    if softcap := gqa.number(node, "softcap", 0.0):
        attributes["softcap"] = softcap
    mixed = add(nodes, "Attention", inputs, f"{name}_mixed", **attributes)
    rows = add(nodes, "Transpose", [mixed], f"{name}_rows", perm=[0, 2, 1, 3])
    width = geometry.heads * geometry.head_dim
    joined = add(nodes, "Reshape", [rows, int64_constant(graph, [0, 0, width])], f"{name}_out")
    old = [node.outputs[gqa.Output.ATTENTION], present_key, present_value]
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, old, [joined, written_key, written_value])


def _check(node: ir.Node) -> None:
    unknown = [
        name
        for name, attribute in node.attributes.items()
        if name not in _LOWERED and attribute.value != _NEUTRAL.get(name)
    ]
    extra = [value.name for value in node.inputs[gqa.Input.SIN + 1 :] if value is not None]
    if unknown or extra:
        raise UnsupportedModelError(
            f"attention {node.outputs[0].name!r} asks for {', '.join(str(x) for x in unknown + extra)}, which standard "
            "ONNX attention cannot express: this model cannot be built for TensorRT"
        )


def _geometry(node: ir.Node, past_key: ir.Value) -> _Geometry:
    shape = past_key.shape
    if shape is None or not isinstance(shape[1], int) or not isinstance(shape[3], int):
        raise UnsupportedModelError(f"the shape of KV cache {past_key.name!r} is not known: {shape}")
    return _Geometry(int(gqa.number(node, "num_heads", 0)), shape[1], shape[3])


def _heads(
    graph: ir.Graph, nodes: list[ir.Node], node: ir.Node, geometry: _Geometry, name: str
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Query, key and value as [batch, heads, tokens, head_dim], unpacked if they come as one product."""
    query, key, value = (gqa.given(node, i) for i in (gqa.Input.QUERY, gqa.Input.KEY, gqa.Input.VALUE))
    assert query is not None
    if key is None or value is None:
        sizes = [count * geometry.head_dim for count in (geometry.heads, geometry.kv_heads, geometry.kv_heads)]
        split = ir.node(
            "Split", [query, int64_constant(graph, sizes)], {"axis": -1}, num_outputs=3, name=f"{name}_split"
        )
        for part, output in zip(("query", "key", "value"), split.outputs, strict=True):
            output.name = f"{name}_{part}_packed"
        nodes.append(split)
        query, key, value = split.outputs

    def shaped(projection: ir.Value, heads: int, part: str) -> ir.Value:
        shape = int64_constant(graph, [0, 0, heads, geometry.head_dim])
        rows = add(nodes, "Reshape", [projection, shape], f"{name}_{part}_rows")
        return add(nodes, "Transpose", [rows], f"{name}_{part}_heads", perm=[0, 2, 1, 3])

    return (
        shaped(query, geometry.heads, "query"),
        shaped(key, geometry.kv_heads, "key"),
        shaped(value, geometry.kv_heads, "value"),
    )


def _rotate(
    nodes: list[ir.Node], node: ir.Node, heads: ir.Value, shared: _Shared, geometry: _Geometry, name: str
) -> ir.Value:
    cos, sin = gqa.given(node, gqa.Input.COS), gqa.given(node, gqa.Input.SIN)
    if cos is None or sin is None or cos.shape is None or not isinstance(cos.shape[1], int):
        raise UnsupportedModelError(f"attention {node.outputs[0].name!r} rotates without a table of known width")
    attributes = {"interleaved": gqa.number(node, "rotary_interleaved", 0)}
    if (rotated := 2 * cos.shape[1]) != geometry.head_dim:
        attributes["rotary_embedding_dim"] = rotated
    return add(nodes, "RotaryEmbedding", [heads, cos, sin, shared.positions], name, **attributes)
