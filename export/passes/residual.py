"""Where a decoder graph can be cut: its sublayers, found by walking the residual stream.

Exporters fuse the residual addition into the norm that follows it (`SkipSimplifiedLayerNormalization`), so the state
between two sublayers is a *pair*: the last sublayer's output `delta` and the running `residual`, their sum being the
residual stream. Every sublayer maps one pair to the next:

    norm(residual + delta) -> attention or MLP -> new delta,    residual + delta -> new residual

Nothing here relies on node names; a layer's number is read off the KV cache its attention uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from via_sd.contract.graphs import kv_place
from via_sd.errors import UnsupportedModelError
from via_sd.export.passes import gqa

SublayerKind = Literal["attention", "mlp"]

SKIP_NORMS = ("SkipSimplifiedLayerNormalization", "SkipLayerNormalization")
NORMS = ("RMSNormalization", "SimplifiedLayerNormalization", "LayerNormalization")
_SUM_OUTPUT = 3  # of a skip norm: input + skip


@dataclass(frozen=True)
class State:
    """The residual stream at a boundary; `delta` is None at the model's entry, where the embedding is the stream."""

    residual: ir.Value
    delta: ir.Value | None


@dataclass(frozen=True)
class Sublayer:
    """One attention or MLP sublayer.

    Attributes:
        layer: its layer's index in the original model.
        kind: attention or MLP.
        norm: the norm node that opens it (consumes the state before).
        nodes: its nodes in graph order, `norm` first.
        before, after: the residual stream at its two boundaries.
        kv: for attention, the KV inputs and the outputs that succeed them, ((past key, present key), (value, value)).
    """

    layer: int
    kind: SublayerKind
    norm: ir.Node
    nodes: tuple[ir.Node, ...]
    before: State
    after: State
    kv: tuple[tuple[ir.Value, ir.Value], ...]


def find_sublayers(graph: ir.Graph) -> list[Sublayer]:
    """The sublayers of a decoder `graph` in order of execution: attention 0, MLP 0, attention 1, …

    Raises:
        UnsupportedModelError: the residual stream is not a chain of attention and MLP sublayers in turn (parallel
            blocks, several streams, other block kinds), which this toolkit cannot prune.
    """
    order = {node: index for index, node in enumerate(graph)}
    norm = _first_norm(graph)
    entry = norm.inputs[0]
    assert entry is not None
    before = State(entry, None)
    sublayers: list[Sublayer] = []
    while before.delta is None or len(norm.outputs) > _SUM_OUTPUT:  # the last norm's sum has no reader, so it may lack
        residual = before.residual if before.delta is None else norm.outputs[_SUM_OUTPUT]
        following = [user for user in residual.consumers() if user.op_type in SKIP_NORMS]
        if not following:
            break
        if len(following) > 1 or len(set(residual.consumers()) - {norm}) > 1:
            raise UnsupportedModelError(
                f"the residual stream forks after {_where(norm, sublayers)}: "
                "only models whose layers are attention, then MLP, one after the other, can be pruned"
            )
        delta = next(v for v in following[0].inputs[:2] if v is not residual)
        assert delta is not None
        nodes = _between(norm, delta, order)
        kv = _kv_pairs(nodes)
        after = State(residual, delta)
        layer, kind = _place(kv, sublayers)
        sublayers.append(Sublayer(layer, kind, norm, nodes, before, after, kv))
        norm, before = following[0], after
    if not sublayers or len(sublayers) % 2:
        raise UnsupportedModelError(
            f"found {len(sublayers)} sublayers on the residual stream, wanted an attention and an MLP for every layer"
        )
    return sublayers


def _first_norm(graph: ir.Graph) -> ir.Node:
    for node in graph:
        if node.op_type in SKIP_NORMS:
            raise UnsupportedModelError("the first norm already adds a residual; this is no decoder graph we know")
        if node.op_type in NORMS:
            return node
    raise UnsupportedModelError("the graph has no normalisation layer: this is no decoder graph we know")


def _between(norm: ir.Node, delta: ir.Value, order: dict[ir.Node, int]) -> tuple[ir.Node, ...]:
    """Nodes that depend on `norm`'s output and lead to `delta`: a backward slice, stopped at values made before."""
    start = order[norm]
    found = {norm}
    stack = [delta.producer()]
    while stack:
        node = stack.pop()
        if node is None or node in found or order[node] < start:
            continue
        found.add(node)
        stack.extend(value.producer() for value in node.inputs if value is not None)
    return tuple(sorted(found, key=order.__getitem__))


def _kv_pairs(nodes: tuple[ir.Node, ...]) -> tuple[tuple[ir.Value, ir.Value], ...]:
    pairs = []
    for node in nodes:
        for past, present in gqa.kv_buffers(node) if node.op_type == gqa.OP_TYPE else ():
            assert past is not None
            pairs.append((past, present))
    return tuple(pairs)


def _place(kv: tuple[tuple[ir.Value, ir.Value], ...], earlier: list[Sublayer]) -> tuple[int, SublayerKind]:
    """Layer index and kind of the next sublayer."""
    if not kv:
        if not earlier or earlier[-1].kind == "mlp":
            raise UnsupportedModelError(f"sublayer {len(earlier)} has no attention where one was wanted")
        return earlier[-1].layer, "mlp"
    place = kv_place(kv[0][0].name)
    layer = len(earlier) // 2
    if place is None or place[0] != layer or (earlier and earlier[-1].kind == "attention"):
        raise UnsupportedModelError(
            f"sublayer {len(earlier)} uses KV cache {kv[0][0].name!r}; wanted the attention of layer {layer}"
        )
    return layer, "attention"


def _where(norm: ir.Node, sublayers: list[Sublayer]) -> str:
    return f"layer {len(sublayers) // 2} ({norm.op_type})"
