"""An exported graph computes what transformers computes, or the model is refused: never something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from via_sd.errors import UnsupportedModelError
from via_sd.export.passes import AttentionSemanticsPass, find_sublayers
from via_sd.export.passes.lower import lower
from via_sd.export.sources.checkpoint import Checkpoint, open_checkpoint

RIGHT = (
    "llama", "llama-untied", "llama-yarn", "qwen2", "qwen3", "mistral", "granite", "phi3", "phi3-window", "smollm3",
    "gemma", "gemma2", "gemma3", "starcoder2", "stablelm", "nemotron", "glm", "glm4", "ernie4_5", "seed-oss", "arcee",
    "olmo", "ministral", "mixtral", "qwen3-moe", "olmoe", "granite-moe",
)  # fmt: skip
#: Post-norm layers, and attention beside the MLP: no chain of attention and MLP sublayers to prune.
REFUSED = ("olmo2", "cohere", "phi")
#: A prefill beyond the window, steps of five at an offset, single steps, a long step at an offset.
STEPS = (40, 5, 5, 1, 1, 1, 5, 32)
WINDOW = 32


@pytest.mark.parametrize("family", RIGHT)
def test_logits_equal_transformers_beyond_every_window(
    family, lowered, checkpoint_of, reference, random_tokens, workshop
):
    tokens = random_tokens(sum(STEPS))
    wanted = reference(checkpoint_of(family), tokens)
    assert wanted.std() > 0.1  # logits that say something
    session = workshop.open(lowered(family).model, family)
    stepwise = session.feed_in(STEPS, tokens)
    session.rewind()
    at_once = session.feed(tokens)
    assert np.abs(stepwise - wanted).max() < 1e-4
    assert np.abs(at_once - wanted).max() < 1e-4
    assert np.abs(stepwise - at_once).max() < 1e-4


@pytest.mark.parametrize("family", RIGHT)
def test_every_layer_is_an_attention_and_an_mlp_sublayer_in_order(family, lowered):
    checkpoint: Checkpoint = lowered(family)
    found = find_sublayers(checkpoint.model.graph)
    assert [(s.layer, s.kind) for s in found] == [(i, k) for i in range(4) for k in ("attention", "mlp")]
    assert [[past.name for past, _ in s.kv] for s in found if s.kind == "attention"] == [
        [f"past_key_values.{i}.{part}" for part in ("key", "value")] for i in range(4)
    ]
    assert checkpoint.identity.num_layers == 4


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_whose_layers_are_no_chain_is_refused(family, checkpoint_of):
    with pytest.raises(UnsupportedModelError, match="sublayer"), open_checkpoint(checkpoint_of(family)):
        pass


def test_a_family_that_the_frontend_builds_otherwise_is_refused(checkpoint_of):
    with (
        pytest.raises(UnsupportedModelError, match="hunyuan_v1_dense wrong: it normalises queries"),
        open_checkpoint(checkpoint_of("hunyuan")),
    ):
        pass


def test_heads_that_the_kernel_does_not_rotate_are_refused_by_their_size(tmp_path, new_checkpoint):
    directory = new_checkpoint(tmp_path / "odd", "llama", head_dim=24)
    with open_checkpoint(directory) as checkpoint, pytest.raises(UnsupportedModelError, match="heads of size 24"):
        lower(checkpoint.model, checkpoint.config, 64)


@pytest.mark.parametrize("family", ["mistral", "phi3-window", "gemma2", "gemma3"])
def test_the_sliding_window_is_what_makes_the_logits_right(
    family, lowered, checkpoint_of, reference, random_tokens, workshop
):
    """The frontend leaves windows out for some families; a graph without them is wrong from the window on."""
    tokens = random_tokens(60)
    checkpoint = lowered(family)
    model = checkpoint.model.clone()
    AttentionSemanticsPass({**checkpoint.config, "sliding_window": None, "layer_types": None}, 128)(model)
    wanted = reference(checkpoint_of(family), tokens)
    difference = np.abs(workshop.open(model, family).feed(tokens) - wanted).max(-1)
    assert difference[:WINDOW].max() < 1e-4
    assert difference[WINDOW:].max() > 1e-2


def test_a_window_no_sequence_reaches_is_left_out(checkpoint_of):
    with open_checkpoint(checkpoint_of("mistral")) as checkpoint:
        lower(checkpoint.model, checkpoint.config, WINDOW)
        windows = {n.attributes.get_int("local_window_size") for n in _attention(checkpoint.model)}
    assert windows == {-1}


def test_the_score_scale_of_gemma_comes_from_its_configuration(lowered):
    """`query_pre_attn_scalar` differs from the head dimension here; the frontend drops it for one of the two."""
    for family in ("gemma2", "gemma3"):
        scales = [n.attributes.get_float("scale") for n in _attention(lowered(family).model)]
        assert scales == pytest.approx([24**-0.5] * 4)


def test_attention_of_another_kind_is_refused(lowered):
    checkpoint = lowered("llama")
    kinds = ["full_attention", "linear_attention", "full_attention", "full_attention"]
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        AttentionSemanticsPass({**checkpoint.config, "layer_types": kinds}, 128)


@pytest.mark.parametrize("family", ["llama", "llama-untied", "gemma2", "granite"])
def test_only_the_logits_asked_for_are_computed_and_they_are_the_same(family, lowered, random_tokens, workshop):
    tokens = random_tokens(50)
    session = workshop.open(lowered(family).model, family)
    every = session.feed(tokens[:40])
    step = session.feed(tokens[40:])
    session.rewind()
    last = session.feed(tokens[:40], rows=1)
    three = session.feed(tokens[40:], rows=3)
    assert last.shape == (1, every.shape[1])
    assert three.shape == (3, every.shape[1])
    assert np.abs(last - every[-1:]).max() < 1e-5
    assert np.abs(three - step[-3:]).max() < 1e-5


def test_a_tied_head_reads_the_embedding_itself(lowered):
    graph = lowered("llama").model.graph
    embedding = next(n for n in graph if n.op_type == "Gather").inputs[0]
    head = next(n for n in graph if n.op_type == "FusedMatMul")
    assert head.inputs[1] is embedding
    assert not [n for n in graph if n.op_type == "Transpose"]


def test_rotary_tables_end_at_the_capacity_and_mean_the_same(checkpoint_of, random_tokens, workshop):
    tokens = random_tokens(64)
    logits = []
    for capacity in (64, 256):
        with open_checkpoint(checkpoint_of("llama")) as checkpoint:
            lower(checkpoint.model, checkpoint.config, capacity)
            tables = {t.name: t.shape for n in _attention(checkpoint.model) for t in n.inputs[7:9]}
            session = workshop.open(checkpoint.model, f"capacity-{capacity}", capacity)
        assert {shape[0] for shape in tables.values()} == {capacity}
        logits.append(session.feed_in((60, 4), tokens))
    assert np.array_equal(*logits)


def test_a_cached_step_of_k_tokens_equals_k_single_steps(lowered, random_tokens, workshop):
    """At every offset, up to the last slot of the buffer."""
    tokens = random_tokens(128)
    session = workshop.open(lowered("mistral").model, "mistral")
    single = session.feed_in([64] + [1] * 64, tokens)
    session.rewind()
    session.feed(tokens[:64])
    blocks = session.feed_in([7, 9, 16, 31, 1], tokens[64:])
    assert np.abs(blocks - single[64:]).max() < 1e-5


def test_a_rewound_buffer_needs_no_clearing(lowered, random_tokens, workshop):
    """What lies behind the length a step is told never matters: rejected tokens are simply overwritten."""
    tokens = random_tokens(60)
    session = workshop.open(lowered("llama").model, "llama")
    clean = session.feed_in((40, 5), tokens[:45])
    session.rewind()
    session.feed(tokens[:40])
    session.feed(tokens[45:60])
    session.past = 40
    assert np.array_equal(session.feed(tokens[40:45]), clean[40:])


def _attention(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "GroupQueryAttention"]


def test_identity_names_the_checkpoint_not_its_precision(
    tmp_path: Path, checkpoint_of: Callable[[str], Path], new_checkpoint, lowered
):
    same = lowered("llama").identity
    with open_checkpoint(checkpoint_of("llama")) as again:
        assert again.identity == same
    with open_checkpoint(new_checkpoint(tmp_path / "other", "llama", seed=1)) as other:
        assert other.identity != same
        assert (other.identity.num_layers, other.identity.hidden_size) == (same.num_layers, same.hidden_size)
