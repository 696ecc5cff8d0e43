"""What can be computed in the place of a run of sublayers, or of the LM head: the branches of a segment.

- `keep`: the nodes that are there.
- `int8`, `int4`: the nodes of the same sublayers in a *variant*, the same decoder with quantised weights, so that a
  tier computes bit for bit what a decoder exported in that precision computes there.
- a bridge: a linear map of the residual stream, added to it.
- `skip`: nothing; the residual stream and the KV buffers are handed on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import onnx_ir as ir

from via_sd.export.passes.quantize import block_product, constant
from via_sd.export.passes.residual import State, Sublayer, find_sublayers
from via_sd.export.passes.segments import KEPT, SKIPPED
from via_sd.export.passes.step_inputs import find_head


@dataclass(frozen=True)
class Bridge:
    """A linear map in the place of a run of sublayers: `stream @ weight + bias` is added to the residual stream.

    Attributes:
        weight: float32 [hidden, hidden].
        bias: float32 [hidden].
        energy: mean square of each channel of the stream, float32 [hidden]; 4-bit blocks are fitted to it.
        bits: of the stored weight: 4, 8, or 32 for float32.
    """

    weight: np.ndarray
    bias: np.ndarray
    energy: np.ndarray
    bits: int = 32


@dataclass(frozen=True)
class Substitutes:
    """What branches are made of.

    Attributes:
        variants: the decoder with quantised weights, by state; only sublayers and a head that some tier runs in that
            state need be quantised.
        bridges: by name, see `bridge_name`.
    """

    variants: Mapping[str, ir.Model] = field(default_factory=dict)
    bridges: Mapping[str, Bridge] = field(default_factory=dict)


@dataclass(frozen=True)
class Body:
    """What one branch computes.

    Attributes:
        nodes: in graph order.
        leaving: for sublayers the residual stream behind them (delta, residual) and the successors of their KV inputs;
            for the LM head the logits. What a branch hands on as it came is the value that entered.
        weights: initializers that only this branch reads; they are in no graph yet.
    """

    nodes: list[ir.Node]
    leaving: list[ir.Value]
    weights: list[ir.Value] = field(default_factory=list)


class Branches:
    """Makes the branches of the decoder `graph`; its boundaries are those it has when this is made.

    Whoever puts branches in place does so from the last unit to the first: the boundaries before it then still hold.
    """

    def __init__(self, graph: ir.Graph, substitutes: Substitutes) -> None:
        self.graph = graph
        self.sublayers = find_sublayers(graph)
        self._head = _head_body(graph)
        self._substitutes = substitutes
        self._variants = {
            state: _Variant(find_sublayers(model.graph), _head_body(model.graph))
            for state, model in substitutes.variants.items()
        }

    def body(self, start: int, stop: int, branch: str) -> Body:
        """A branch of the sublayers from `start` to `stop` (not included), or of the LM head behind the last of them.

        The nodes of `keep` are those in the graph, others are new and in no graph.
        """
        is_head = start == len(self.sublayers)
        if branch == KEPT:
            return self._head if is_head else _run_body(self.sublayers[start:stop])
        if branch in self._variants:
            return self._quantised(start, stop, branch)
        entering = self._entering(self.sublayers[start:stop])
        return Body([], entering) if branch == SKIPPED else self._bridge(entering, branch)

    def _entering(self, run: Sequence[Sublayer]) -> list[ir.Value]:
        before = explicit_state(self.graph, run[0])
        assert before.delta is not None
        return [before.delta, before.residual, *(past for sublayer in run for past, _ in sublayer.kv)]

    def _quantised(self, start: int, stop: int, state: str) -> Body:
        variant = self._variants[state]
        known: dict[ir.Value, ir.Value] = {}
        if start == len(self.sublayers):
            original = variant.head
        else:
            original = _run_body(variant.sublayers[start:stop])
            there, here = variant.sublayers[start].before, self.sublayers[start].before
            known[there.residual] = here.residual
            if there.delta is not None and here.delta is not None:
                known[there.delta] = here.delta
        own: list[ir.Value] = []
        copies = [self._copy(node, known, own, state) for node in original.nodes]
        return Body(copies, [known[value] for value in original.leaving], own)

    def _copy(self, node: ir.Node, known: dict[ir.Value, ir.Value], own: list[ir.Value], state: str) -> ir.Node:
        """`node` of a variant over this graph's values.

        Args:
            known: what stands for a value of the variant where names do not tell; gets what is copied.
            own: gets the weights that only the variant has.
        """
        for value in node.inputs:
            if value is None or value in known:
                continue
            name = value.name or ""
            if value.const_value is None:
                known[value] = self._values[name]
            elif name in self.graph.initializers:
                known[value] = self.graph.initializers[name]
            else:
                known[value] = ir.Value(name=name, type=value.type, shape=value.shape, const_value=value.const_value)
                own.append(known[value])
        copy = ir.Node(
            node.domain,
            node.op_type,
            [value and known[value] for value in node.inputs],
            list(node.attributes.values()),
            num_outputs=len(node.outputs),
            name=f"{node.name}_{state}",
        )
        for value, made in zip(node.outputs, copy.outputs, strict=True):
            made.name = f"{value.name}_{state}" if value.name else value.name
            made.type, made.shape = value.type, value.shape
            known[value] = made
        return copy

    @cached_property
    def _values(self) -> dict[str, ir.Value]:
        made = [output for node in self.graph for output in node.outputs]
        return {value.name: value for value in [*self.graph.inputs, *made] if value.name}

    def _bridge(self, entering: Sequence[ir.Value], name: str) -> Body:
        bridge = self._substitutes.bridges[name]
        delta, residual, *kv = entering
        stream = stream_node("Add", [residual, delta], f"{name}.stream", delta)
        bias = constant(f"{name}.bias", bridge.bias)
        if bridge.bits == 32:
            weights = [constant(f"{name}.weight", bridge.weight), bias]
            product = ir.node("MatMul", [stream.outputs[0], weights[0]], name=f"{name}.product")
        else:
            product, table, scale = block_product(
                stream.outputs[0], bridge.weight, f"{name}.weight", bridge.bits, energy=bridge.energy
            )
            weights = [table, scale, bias]
        product.outputs[0].name = f"{name}.product"
        product.outputs[0].type, product.outputs[0].shape = delta.type, delta.shape
        moved = stream_node("Add", [product.outputs[0], bias], f"{name}.moved", delta)
        added = stream_node("Add", [delta, moved.outputs[0]], f"{name}.delta", delta)
        return Body([stream, product, moved, added], [added.outputs[0], residual, *kv], weights)


@dataclass(frozen=True)
class _Variant:
    sublayers: list[Sublayer]
    head: Body


def _run_body(run: Sequence[Sublayer]) -> Body:
    after = run[-1].after
    assert after.delta is not None
    nodes = [node for sublayer in run for node in sublayer.nodes]
    return Body(nodes, [after.delta, after.residual, *(present for sublayer in run for _, present in sublayer.kv)])


def _head_body(graph: ir.Graph) -> Body:
    """The head's product with what scales or caps it: an engine may fuse them, so that apart they round otherwise."""
    head = find_head(graph)
    nodes, made = [head], set(head.outputs)
    for node in graph:
        if not made.isdisjoint(node.inputs):
            nodes.append(node)
            made.update(node.outputs)
    return Body(nodes, [value for value in graph.outputs if value in made])


def explicit_state(graph: ir.Graph, sublayer: Sublayer) -> State:
    """The state before `sublayer` as a pair; at the model's entry the missing delta is made, as exact zeros."""
    before = sublayer.before
    if before.delta is not None:
        return before
    made = next((user for user in before.residual.consumers() if user.name == _ENTRY), None)
    if made is None:
        made = stream_node("Sub", [before.residual, before.residual], _ENTRY, before.residual)
        graph.insert_before(sublayer.norm, made)
    return State(before.residual, made.outputs[0])


_ENTRY = "entry_delta"


def stream_node(op_type: str, inputs: list[ir.Value], name: str, like: ir.Value) -> ir.Node:
    """A node with one output that has its name, and the type and shape of `like`."""
    node = ir.node(op_type, inputs, name=name)
    node.outputs[0].name = name
    node.outputs[0].type, node.outputs[0].shape = like.type, like.shape
    return node
