"""Tiers in other precisions: what they run is what a decoder exported in that precision runs there, bit for bit."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from tests.support.graph_tiers import LAYERS, STEPS, Tiers, variants_of
from via_sd.export.passes import (
    FuseGateUpPass,
    PrunePass,
    QuantizePass,
    RoutePass,
    Segment,
    keep_vector,
    plan_segments,
)
from via_sd.export.portable.unroute import UnroutePass
from via_sd.export.writer.weights import initializers
from via_sd.masks import Mask

WHOLE = Mask.from_layers([True] * LAYERS)
SKIPPING = Mask.from_flags((True, True, False, True), (True, False, False, True))
#: Every state next to every other, and the head in another precision than the sublayers.
MIXED = Mask(("int8", "keep", "skip", "int4"), ("int4", "int8", "keep", "skip"), "int4", name="mixed")


def quantised(model: ir.Model, bits: int) -> ir.Model:
    """`model` as an export in `bits` leaves it."""
    copy = model.clone()
    FuseGateUpPass()(copy)
    QuantizePass(bits)(copy)
    return copy


def with_embedding_of(model: ir.Model, quantised: ir.Model) -> ir.Model:
    """A copy of `quantised` that looks tokens up in the float table of `model`: a slim tier shares full's embedding."""
    copy = quantised.clone()
    lookup = next(node for node in copy.graph if node.op_type == "GatherBlockQuantized")
    table = next(node for node in model.graph if node.op_type == "Gather").inputs[0]
    weight = ir.Value(name=table.name, type=table.type, shape=table.shape, const_value=table.const_value)
    copy.graph.register_initializer(weight)
    gather = ir.node("Gather", [weight, lookup.inputs[1]])
    ir.convenience.replace_nodes_and_values(
        copy.graph, lookup, [lookup], [gather], [lookup.outputs[0]], [gather.outputs[0]]
    )
    return copy


@pytest.mark.parametrize("family", ["llama", "llama-untied", "qwen2", "qwen3", "granite", "phi3", "gemma3"])
@pytest.mark.parametrize("state", ["int8", "int4"])
@pytest.mark.parametrize("mask", [WHOLE, SKIPPING], ids=["whole", "skipping"])
def test_slim_is_the_pruned_graph_of_a_quantised_export(family, state, mask, lowered, random_tokens, workshop):
    model = lowered(family).model
    slim = mask.in_precision(state)
    own = quantised(model, int(state[-1]))
    if any(node.op_type == "GatherBlockQuantized" for node in own.graph):
        own = with_embedding_of(model, own)
    wanted = workshop.open(PrunePass(mask)(own).model, "export")
    found = workshop.open(PrunePass(slim, variants_of(model, [slim]))(model.clone()).model, "slim")
    tokens = random_tokens(sum(STEPS))
    assert np.array_equal(found.feed_in(STEPS, tokens), wanted.feed_in(STEPS, tokens))
    assert found.kv.keys() == wanted.kv.keys()
    for name, buffer in wanted.kv.items():
        assert np.array_equal(found.kv[name], buffer), name


TIERS = {
    "the whole model in int8": [WHOLE.in_precision("int8")],
    "int8 with skips": [SKIPPING.in_precision("int8")],
    "int4 with a head in int8": [Mask(WHOLE.attention, WHOLE.mlp, "int8").in_precision("int4")],
    "the head alone": [Mask(WHOLE.attention, WHOLE.mlp, "int8")],
    "every state": [MIXED],
    "slim in int8 and a deeper drafter in int4": [
        WHOLE.in_precision("int8"),
        Mask.from_layers([True, False, False, True], name="drafter").in_precision("int4"),
    ],
    "four branches": [WHOLE.in_precision("int8"), Mask(("int4",) * 4, ("int4",) * 4, name="low"), MIXED, SKIPPING],
}
TIERS["four branches"][3] = Mask(SKIPPING.attention, SKIPPING.mlp, name="skipping")


@pytest.mark.parametrize("name", TIERS)
def test_the_routed_graph_is_full_and_every_tier_bit_for_bit(name, lowered, random_tokens, workshop):
    model, masks = lowered("llama").model, TIERS[name]
    Tiers(model, masks, workshop, variants_of(model, masks)).check(random_tokens(sum(STEPS)))


@pytest.mark.parametrize("family", ["llama-untied", "qwen3", "granite", "phi3", "smollm3", "gemma2"])
def test_every_family_has_tiers_in_precisions(family, lowered, random_tokens, workshop):
    model, masks = lowered(family).model, [WHOLE.in_precision("int8"), MIXED]
    Tiers(model, masks, workshop, variants_of(model, masks)).check(random_tokens(sum(STEPS)))


def test_full_may_be_quantised_itself(lowered, random_tokens, workshop):
    """int8 full, int4 slim: the variant comes from the float32 weights, as full does."""
    model, masks = lowered("llama").model, [WHOLE.in_precision("int4"), SKIPPING.in_precision("int4")]
    masks[1] = Mask(masks[1].attention, masks[1].mlp, masks[1].head, name="skipping")
    substitutes = variants_of(model, masks)
    Tiers(quantised(model, 8), masks, workshop, substitutes).check(random_tokens(sum(STEPS)))


def test_a_tier_reads_kv_that_another_wrote(lowered, random_tokens, workshop):
    tokens = random_tokens(46)
    model, masks = lowered("llama").model, [WHOLE.in_precision("int8")]
    tiers = Tiers(model, masks, workshop, variants_of(model, masks))
    slim = tiers.pruned["slim"]
    tiers.plain.feed(tokens[:40])
    for name, buffer in slim.kv.items():
        buffer[:] = tiers.plain.kv[name]
    slim.past = 40
    wanted = slim.feed(tokens[40:])
    tiers.routed.feed(tokens[:40], tiers.all_true)
    assert np.array_equal(tiers.routed.feed(tokens[40:], keep_vector(masks[0], tiers.segments)), wanted)
    tiers.routed.past = 40
    assert np.array_equal(tiers.routed.feed(tokens[40:], tiers.all_true), tiers.plain.feed(tokens[40:]))


def test_tiers_share_one_copy_of_what_they_run_in_the_same_precision(lowered):
    model, masks = lowered("llama").model, TIERS["four branches"]
    routed = RoutePass(plan_segments(masks, 2 * LAYERS), variants_of(model, masks))(model.clone()).model
    tables = [value for value in initializers(routed) if value.const_value.nbytes > 1024]
    contents = {value.const_value.tobytes() for value in tables}
    assert len(contents) == len(tables)
    assert {value.name for value in tables} >= set(model.graph.initializers) - {
        name for name, value in model.graph.initializers.items() if value.const_value.nbytes <= 1024
    }


def test_weights_lie_where_the_engine_packs_them(lowered):
    """In the main graph where the branch is one `If` away from it, and in the branch's own graph beyond."""
    model, masks = lowered("llama").model, TIERS["every state"]
    two = RoutePass(plan_segments(masks, 2 * LAYERS), variants_of(model, masks))(model.clone()).model
    assert not any(graph.initializers for graph in two.graph.subgraphs())
    masks = TIERS["slim in int8 and a deeper drafter in int4"]
    three = RoutePass(plan_segments(masks, 2 * LAYERS), variants_of(model, masks))(model.clone()).model
    inner = [node for graph in three.graph.subgraphs() for node in graph if node.op_type == "If"]
    assert inner
    for branch in (graph for node in inner for graph in (a.as_graph() for a in node.attributes.values())):
        read = {value for node in branch if node.op_type == "MatMulNBits" for value in node.inputs[1:]}
        assert set(branch.initializers.values()) == read


def test_a_variant_quantises_what_some_tier_runs_in_it_and_no_more(lowered):
    variants = variants_of(lowered("llama").model, [MIXED]).variants
    layers = {
        state: {
            sum(node.op_type == "MatMulNBits" for node in variant.graph),
            sum(node.op_type in ("MatMul", "FusedMatMul") for node in variant.graph),
        }
        for state, variant in variants.items()
    }
    # Attention and MLP have two products each, the model 17; each state has one of each kind, int4 the head besides.
    assert layers == {"int8": {4, 13}, "int4": {5, 12}}


def test_unrouting_leaves_full_and_its_weights_alone(lowered, random_tokens, workshop):
    model, masks = lowered("llama").model, TIERS["four branches"]
    routed = RoutePass(plan_segments(masks, 2 * LAYERS), variants_of(model, masks))(model.clone()).model
    UnroutePass()(routed)
    assert {value.name for value in initializers(routed)} == set(model.graph.initializers)
    tokens = random_tokens(sum(STEPS))
    plain = workshop.open(model, "plain").feed_in(STEPS, tokens)
    assert np.array_equal(workshop.open(routed, "unrouted").feed_in(STEPS, tokens), plain)


@pytest.mark.parametrize(
    ("masks", "wanted"),
    [
        ([WHOLE.in_precision("int8")], [(0, 8, "keep", "int8"), (8, 9, "keep", "int8")]),
        ([Mask(WHOLE.attention, WHOLE.mlp, "int4")], [(8, 9, "keep", "int4")]),
        (
            [Mask(("int8", "int8", "skip", "keep"), ("int8", "skip", "skip", "keep"))],
            [(0, 3, "keep", "int8"), (3, 6, "keep", "skip")],
        ),
        (
            [WHOLE.in_precision("int8"), Mask(("int4",) * 4, ("int4", "skip", "int4", "int4"), "int8", name="low")],
            [
                (0, 3, "keep", "int8", "int4"),
                (3, 4, "keep", "int8", "skip"),
                (4, 8, "keep", "int8", "int4"),
                (8, 9, "keep", "int8"),
            ],
        ),
    ],
)
def test_segments_have_a_branch_for_each_thing_that_tiers_do(masks, wanted):
    assert plan_segments(masks, 2 * LAYERS) == [Segment(start, stop, tuple(names)) for start, stop, *names in wanted]


def test_the_first_true_entry_of_a_segment_takes_its_branch():
    masks = [WHOLE.in_precision("int8"), Mask(("int4",) * 4, ("int4", "skip", "int4", "int4"), "int8", name="low")]
    segments = plan_segments(masks, 2 * LAYERS)
    assert keep_vector(WHOLE, segments) == [True] * 7
    assert keep_vector(masks[0], segments) == [False, True, False, True, False, True, False]
    assert keep_vector(masks[1], segments) == [False, False, False, False, False, False, False]
