"""One routed graph is every tier at once, bit for bit, and leaves the KV buffers of skipped layers alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.graph_tiers import LAYERS, STEPS, Tiers
from via_sd.export.passes import PrunePass, RoutePass, Segment, keep_vector, plan_segments, sublayer_segments
from via_sd.masks import Mask


def mask_without(attention: list[int], mlp: list[int], name: str = "slim") -> Mask:
    return Mask.from_flags(
        tuple(i not in attention for i in range(LAYERS)), tuple(i not in mlp for i in range(LAYERS)), name=name
    )


ONE_MASK = {
    "adjacent layers": mask_without([1, 2], [1, 2]),
    "scattered layers": mask_without([0, 2], [0, 2]),
    "first layer": mask_without([0], [0]),
    "last layer": mask_without([3], [3]),
    "attention only": mask_without([1, 2], []),
    "MLP only": mask_without([], [0, 3]),
    "scattered sublayers": mask_without([0, 2], [1, 3]),
    "all but one layer": mask_without([0, 1, 3], [0, 1, 3]),
}
NESTED = [
    mask_without([2], [2], "slim"),
    mask_without([1, 2], [2, 3], "smaller"),
    mask_without([0, 1, 2], [1, 2, 3], "smallest"),
]


@pytest.mark.parametrize("name", ONE_MASK)
def test_routed_graph_is_the_plain_and_the_pruned_graph_bit_for_bit(name, lowered, random_tokens, workshop):
    Tiers(lowered("llama").model, [ONE_MASK[name]], workshop).check(random_tokens(sum(STEPS)))


@pytest.mark.parametrize(
    "family", ["llama-untied", "qwen3", "mistral", "granite", "phi3", "smollm3", "gemma2", "gemma3"]
)
def test_every_family_is_routed_bit_for_bit(family, lowered, random_tokens, workshop):
    masks = [mask_without([0, 3], [0, 1], "slim"), mask_without([0, 1, 3], [0, 1, 2], "draft")]
    Tiers(lowered(family).model, masks, workshop).check(random_tokens(sum(STEPS)))


def test_several_masks_share_one_graph(lowered, random_tokens, workshop):
    tiers = Tiers(lowered("llama").model, NESTED, workshop)
    tiers.check(random_tokens(sum(STEPS)))


def test_the_tier_may_change_from_step_to_step(lowered, random_tokens, workshop):
    """Slim reads KV that full wrote and the reverse: the buffers are shared, whoever filled them."""
    tokens = random_tokens(46)
    mask = ONE_MASK["adjacent layers"]
    tiers = Tiers(lowered("llama").model, [mask], workshop)
    slim, full = tiers.pruned["slim"], tiers.plain
    full.feed(tokens[:40])
    for name, buffer in slim.kv.items():
        buffer[:] = full.kv[name]
    slim.past = 40
    wanted = slim.feed(tokens[40:])
    tiers.routed.feed(tokens[:40], [True])
    assert np.array_equal(tiers.routed.feed(tokens[40:], [False]), wanted)
    tiers.routed.past = 40
    assert np.array_equal(tiers.routed.feed(tokens[40:], [True]), full.feed(tokens[40:]))


@pytest.fixture(scope="module")
def per_sublayer(lowered, module_workshop):
    """A session over a graph with one segment per sublayer."""
    routed = lowered("llama").model.clone()
    RoutePass(sublayer_segments(2 * LAYERS))(routed)
    return module_workshop.open(routed, "routed")


@given(flags=st.lists(st.booleans(), min_size=2 * LAYERS, max_size=2 * LAYERS).filter(any))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_one_segment_per_sublayer_runs_any_mask(flags, lowered, per_sublayer, module_workshop, random_tokens):
    mask = Mask.from_flags(tuple(flags[0::2]), tuple(flags[1::2]))
    name = "".join("01"[flag] for flag in flags)
    if not (module_workshop.root / name).exists():
        pruned = lowered("llama").model.clone()
        PrunePass(mask)(pruned)
        module_workshop.save(pruned, name)
    own = module_workshop.reopen(name)
    per_sublayer.rewind()
    tokens = random_tokens(sum(STEPS))
    assert keep_vector(mask, sublayer_segments(2 * LAYERS)) == flags
    assert np.array_equal(own.feed_in(STEPS, tokens), per_sublayer.feed_in(STEPS, tokens, flags))


def test_without_a_mask_there_is_nothing_to_choose(lowered):
    model = lowered("llama").model.clone()
    RoutePass(plan_segments([], 2 * LAYERS))(model)
    assert "keep" not in {value.name for value in model.graph.inputs}


def test_each_segment_is_one_branch_and_weights_stay_outside(lowered):
    """Initializers of the outer graph serve both the branch and any other graph over the same weights file."""
    model = lowered("llama").model.clone()
    weights = set(model.graph.initializers)
    segments = plan_segments(NESTED, 2 * LAYERS)
    RoutePass(segments)(model)
    branches = [node for node in model.graph if node.op_type == "If"]
    assert len(branches) == len(segments)
    assert set(model.graph.initializers) == weights
    assert not any(
        b.attributes[name].as_graph().initializers for b in branches for name in ("then_branch", "else_branch")
    )


@pytest.mark.parametrize(
    ("masks", "wanted"),
    [
        ([], []),
        ([mask_without([], [])], []),
        ([mask_without([1, 2], [1, 2])], [(2, 6)]),
        ([mask_without([0, 3], [0, 3])], [(0, 2), (6, 8)]),
        ([mask_without([2], [1])], [(3, 5)]),
        (NESTED, [(0, 1), (2, 3), (3, 4), (4, 6), (7, 8)]),
    ],
)
def test_segments_are_the_runs_that_all_masks_treat_alike(masks, wanted):
    assert plan_segments(masks, 2 * LAYERS) == [Segment(*span, ("keep", "skip")) for span in wanted]


@given(
    votes=st.lists(
        st.lists(st.booleans(), min_size=2 * LAYERS, max_size=2 * LAYERS).filter(any), min_size=1, max_size=3
    )
)
@settings(derandomize=True)
def test_every_mask_is_recovered_from_its_keep_vector(votes):
    masks = [Mask.from_flags(tuple(flags[0::2]), tuple(flags[1::2])) for flags in votes]
    segments = plan_segments(masks, 2 * LAYERS)
    for mask in masks:
        flags = [True] * (2 * LAYERS)
        for segment, keep in zip(segments, keep_vector(mask, segments), strict=True):
            flags[segment.start : segment.stop] = [keep] * (segment.stop - segment.start)
        assert tuple(flags) == mask.sublayers
