"""A pruned graph is the model with those sublayers taken out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from via_sd.export.passes import PrunePass, RoutePass, keep_vector, plan_segments
from via_sd.masks import Mask

#: Mask by name: (layers without attention, layers without MLP).
MASKS = {
    "one layer": ([1], [1]),
    "adjacent layers": ([1, 2], [1, 2]),
    "scattered layers": ([1, 3], [1, 3]),
    "first layer": ([0], [0]),
    "last layer": ([3], [3]),
    "first and last layer": ([0, 3], [0, 3]),
    "all but the first layer": ([1, 2, 3], [1, 2, 3]),
    "all but the last layer": ([0, 1, 2], [0, 1, 2]),
    "attention only": ([1, 2], []),
    "MLP only": ([], [1, 2]),
    "first attention": ([0], []),
    "first MLP": ([], [0]),
    "last attention": ([3], []),
    "last MLP": ([], [3]),
    "scattered sublayers": ([0, 2], [1, 3]),
    "an MLP and the attention behind it": ([2], [1]),
    "every attention": ([0, 1, 2, 3], []),
    "every MLP": ([], [0, 1, 2, 3]),
    "one attention left": ([0, 1, 3], [0, 1, 2, 3]),
    "one MLP left": ([0, 1, 2, 3], [0, 1, 3]),
}
#: Families that differ in where they scale, normalise twice, slide a window or normalise queries.
FAMILIES = ("llama", "qwen3", "mistral", "granite", "phi3", "smollm3", "gemma2", "gemma3")
#: Families that rotate part of a head or neighbours, normalise with a mean or four times, or have experts.
MORE_FAMILIES = (
    "starcoder2",
    "stablelm",
    "nemotron",
    "glm4",
    "ernie4_5",
    "olmo",
    "mixtral",
    "qwen3-moe",
    "granite-moe",
)


def mask_without(attention: list[int], mlp: list[int], layers: int = 4) -> Mask:
    return Mask.from_flags(tuple(i not in attention for i in range(layers)), tuple(i not in mlp for i in range(layers)))


@pytest.mark.parametrize("name", MASKS)
def test_pruned_llama_equals_transformers_without_those_sublayers(
    name, lowered, checkpoint_of, reference, random_tokens, workshop
):
    check_pruned("llama", name, lowered, checkpoint_of, reference, random_tokens, workshop)


@pytest.mark.parametrize("family", FAMILIES[1:])
@pytest.mark.parametrize("name", ["first and last layer", "adjacent layers", "scattered sublayers"])
def test_pruned_families_equal_transformers_without_those_sublayers(
    family, name, lowered, checkpoint_of, reference, random_tokens, workshop
):
    check_pruned(family, name, lowered, checkpoint_of, reference, random_tokens, workshop)


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_pruned_and_routed_families_equal_transformers_without_those_sublayers(
    family, lowered, checkpoint_of, reference, random_tokens, workshop
):
    check_pruned(family, "scattered sublayers", lowered, checkpoint_of, reference, random_tokens, workshop)
    mask = mask_without(*MASKS["scattered sublayers"])
    segments = plan_segments([mask], 8)
    routed = workshop.open(RoutePass(segments)(lowered(family).model.clone()).model, "routed")
    tokens = random_tokens(50)
    slim = workshop.reopen("pruned").feed_in((40, 5, 5), tokens)
    difference = np.abs(routed.feed_in((40, 5, 5), tokens, keep_vector(mask, segments)) - slim).max()
    # Biases behind every product are fused into it, which ONNX Runtime does otherwise within a branch.
    assert difference <= (1e-5 if family == "starcoder2" else 0)


def check_pruned(family, name, lowered, checkpoint_of, reference, random_tokens, workshop):
    attention, mlp = MASKS[name]
    steps = (40, 5, 1, 1, 3)
    tokens = random_tokens(sum(steps))
    wanted = reference(checkpoint_of(family), tokens, skip_attention=attention, skip_mlp=mlp)
    unpruned = reference(checkpoint_of(family), tokens)
    assert np.abs(wanted - unpruned).max() > 1e-2  # the sublayers matter

    model = lowered(family).model.clone()
    PrunePass(mask_without(attention, mlp))(model)
    session = workshop.open(model, "pruned")
    assert np.abs(session.feed_in(steps, tokens) - wanted).max() < 1e-4


@pytest.mark.parametrize("name", MASKS)
def test_kept_layers_keep_the_names_of_their_kv_and_skipped_ones_have_none(name, lowered):
    attention, mlp = MASKS[name]
    model = lowered("llama").model.clone()
    PrunePass(mask_without(attention, mlp))(model)
    kept = {f"past_key_values.{i}.{part}" for i in range(4) if i not in attention for part in ("key", "value")}
    assert {v.name for v in model.graph.inputs if v.name.startswith("past_key_values.")} == kept
    presents = {name.replace("past_key_values", "present") for name in kept}
    assert {v.name for v in model.graph.outputs if v.name.startswith("present.")} == presents


def test_weights_of_skipped_sublayers_leave_the_graph(lowered):
    model = lowered("llama").model.clone()
    PrunePass(mask_without([2], [2]))(model)
    used = {value.name for node in model.graph for value in node.inputs if value is not None and value.is_initializer()}
    assert not [name for name in used if "layers.2." in name]
    for layer in (0, 1, 3):
        assert [name for name in used if f"layers.{layer}." in name]


def test_a_mask_that_keeps_all_changes_nothing(lowered, random_tokens, workshop):
    model = lowered("llama").model
    pruned = model.clone()
    PrunePass(mask_without([], []))(pruned)
    tokens = random_tokens(45)
    plain, same = workshop.open(model, "plain"), workshop.open(pruned, "pruned")
    assert np.array_equal(plain.feed_in((40, 5), tokens), same.feed_in((40, 5), tokens))


def test_a_mask_of_another_length_is_refused(lowered):
    with pytest.raises(ValueError, match="10 sublayers, the graph 8"):
        PrunePass(Mask.from_layers([True, False, True, True, True]))(lowered("llama").model.clone())
