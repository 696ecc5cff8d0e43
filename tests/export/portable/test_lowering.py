"""The portable graph computes what transformers and the exported graph compute, in standard operators alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tests.support.portable_session import open_portable
from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.export.passes import PrunePass, RoutePass, plan_segments
from via_sd.export.portable import DTYPES, to_portable
from via_sd.masks import Mask

FAMILIES = (
    "llama", "llama-untied", "llama-yarn", "qwen2", "qwen3", "mistral", "granite", "phi3", "smollm3", "gemma2",
    "gemma3",
    "glm4",
)  # fmt: skip
CAPACITY, VOCABULARY, HIDDEN = 128, 320, 64
LAYERS = 4
#: Prefill, five tokens at an offset, single tokens, a long step at an offset: 90 tokens, past every window (32).
STEPS = (40, 5, 1, 1, 5, 38)
SLIM = Mask.from_flags((True, True, False, True), (True, False, False, True))


def operators(model: ir.Model) -> set[str]:
    return {f"{node.domain}:{node.op_type}" if node.domain else node.op_type for node in model.graph.all_nodes()}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_at_prefill_and_at_offsets_past_every_window(
    family, lowered, checkpoint_of, reference, tmp_path
):
    tokens = np.random.default_rng(1).integers(0, 256, (2, sum(STEPS)))
    wanted = np.stack([reference(checkpoint_of(family), row) for row in tokens])
    assert wanted.std() > 0.1  # logits that say something
    model = to_portable(lowered(family).model, max_seq_len=CAPACITY)
    for batch in (1, 2):
        found = open_portable(model, tmp_path / f"{batch}" / "model.onnx", batch).feed_in(STEPS, tokens[:batch])
        assert np.abs(found - wanted[:batch]).max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_only_standard_operators_of_opset_24_are_left_and_the_onnx_checker_accepts_them(family, lowered, tmp_path):
    model = to_portable(lowered(family).model, max_seq_len=CAPACITY)
    assert model.opset_imports == {"": 24}
    assert operators(model) >= {"Attention", "TensorScatter", "RMSNormalization", "RotaryEmbedding"}
    ir.save(model, tmp_path / "model.onnx")
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)


def test_sequences_of_a_batch_may_stand_at_different_positions(lowered, tmp_path, random_tokens):
    tokens = np.array(random_tokens(30))
    model = to_portable(lowered("qwen2").model, max_seq_len=CAPACITY)
    alone = open_portable(model, tmp_path / "model.onnx").feed_in([30], tokens[None])[0]
    pair = open_portable(model, tmp_path / "model.onnx", batch=2)
    pair.feed(np.stack([tokens[:20], tokens[:20]]), [0, 0], [0])
    # The second sequence forgets its last seven tokens and goes on from there.
    logits = pair.feed(np.stack([tokens[20:25], tokens[13:18]]), [20, 13], range(5))
    assert np.abs(logits[0] - alone[20:25]).max() < 1e-4
    assert np.abs(logits[1] - alone[13:18]).max() < 1e-4


def test_a_step_that_ends_in_the_last_slot_of_the_cache_is_right(lowered, checkpoint_of, reference, tmp_path):
    tokens = np.random.default_rng(3).integers(0, 256, (1, CAPACITY))
    model = to_portable(lowered("llama").model, max_seq_len=CAPACITY)
    found = open_portable(model, tmp_path / "model.onnx").feed_in([CAPACITY - 4, 3, 1], tokens)
    assert np.abs(found[0] - reference(checkpoint_of("llama"), tokens[0])).max() < 1e-4


def test_what_lies_behind_a_step_in_the_cache_is_not_seen(lowered, tmp_path, random_tokens):
    tokens = np.array(random_tokens(24))[None]
    session = open_portable(to_portable(lowered("llama").model, max_seq_len=CAPACITY), tmp_path / "model.onnx")
    wanted = session.feed_in([24], tokens)[0]
    for cache in session.caches.values():
        cache[:, :, 10:] = 1e4
    found = [
        session.feed(tokens[:, start:stop], [start], range(stop - start), visible=CAPACITY)[0]
        for start, stop in ((10, 15), (15, 24))
    ]
    assert np.abs(np.concatenate(found) - wanted[10:]).max() < 1e-4


def test_looking_further_than_needed_changes_nothing(lowered, tmp_path, random_tokens):
    tokens = np.array(random_tokens(24))[None]
    session = open_portable(to_portable(lowered("gemma2").model, max_seq_len=CAPACITY), tmp_path / "model.onnx")
    session.feed(tokens[:, :20], [0], [0])
    near = session.feed(tokens[:, 20:], [20], range(4), visible=24)
    far = session.feed(tokens[:, 20:], [20], range(4), visible=CAPACITY)
    assert np.abs(near - far).max() < 1e-5


def test_only_the_rows_asked_for_are_computed_in_the_order_they_are_asked_for(lowered, tmp_path, random_tokens):
    tokens = np.array(random_tokens(12))[None]
    session = open_portable(to_portable(lowered("llama").model, max_seq_len=CAPACITY), tmp_path / "model.onnx")
    every = session.feed(tokens, [0], range(12))
    some = session.feed(tokens, [0], [11, 3])
    assert some.shape == (1, 2, every.shape[2])
    assert np.abs(some - every[:, [11, 3]]).max() < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_routed_graph_lowers_to_what_a_plain_one_lowers_to(family, lowered, tmp_path, random_tokens):
    tokens = np.array([random_tokens(sum(STEPS))])
    plain = lowered(family).model
    routed = RoutePass(plan_segments([SLIM], 2 * LAYERS))(plain.clone()).model
    assert "If" in operators(routed)
    found, wanted = to_portable(routed, max_seq_len=CAPACITY), to_portable(plain, max_seq_len=CAPACITY)
    assert Counter(n.op_type for n in found.graph) == Counter(n.op_type for n in wanted.graph)
    assert [v.name for v in found.graph.inputs] == [v.name for v in wanted.graph.inputs]
    assert [v.name for v in found.graph.outputs] == [v.name for v in wanted.graph.outputs]
    logits = [
        open_portable(model, tmp_path / name / "model.onnx").feed_in(STEPS, tokens)
        for name, model in (("routed", found), ("plain", wanted))
    ]
    assert np.array_equal(*logits)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("routed", [False, True])
def test_a_mask_gives_the_pruned_graph_with_original_layer_indices(
    family, routed, lowered, workshop, tmp_path, random_tokens
):
    tokens = random_tokens(sum(STEPS))
    exported = lowered(family).model
    wanted = workshop.open(PrunePass(SLIM)(exported.clone()).model, "slim").feed_in(STEPS, tokens)
    source = RoutePass(plan_segments([SLIM], 2 * LAYERS))(exported.clone()).model if routed else exported
    model = to_portable(source, max_seq_len=CAPACITY, mask=SLIM)
    caches = [v.name for v in model.graph.inputs if (v.name or "").startswith("past_key_values.")]
    assert caches == [f"past_key_values.{i}.{part}" for i in (0, 1, 3) for part in ("key", "value")]
    found = open_portable(model, tmp_path / "model.onnx").feed_in(STEPS, np.array([tokens]))
    assert np.abs(found[0] - wanted).max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_half_precision_stays_close_to_float32(family, lowered, tmp_path, random_tokens):
    tokens = np.array([random_tokens(sum(STEPS))])
    exact = open_portable(to_portable(lowered(family).model, max_seq_len=CAPACITY), tmp_path / "a" / "model.onnx")
    half = to_portable(lowered(family).model, max_seq_len=CAPACITY, dtype="fp16")
    wanted = exact.feed_in(STEPS, tokens)
    found = open_portable(half, tmp_path / "b" / "model.onnx").feed_in(STEPS, tokens)
    assert found.dtype == np.float32
    assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_weights_activations_and_caches_have_one_dtype_and_logits_are_float32(name, lowered, tmp_path):
    dtype = DTYPES[name]
    model = to_portable(lowered("gemma2").model, max_seq_len=CAPACITY, dtype=name)
    floating = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
    # Scalars of the row numbers, which are computed from the float32 logits, are float32.
    held = [v for v in model.graph.initializers.values() if v.dtype in floating and "float32_" not in v.name]
    assert {v.dtype for v in held} == {v.const_value.dtype for v in held} == {dtype}
    for value in [*model.graph.inputs, *model.graph.outputs]:
        assert value.dtype in (dtype, ir.DataType.INT64) or value.name in ("logits", "row_numbers")
    assert [v.dtype for v in model.graph.outputs[:2]] == [ir.DataType.FLOAT, ir.DataType.FLOAT]
    ir.save(model, tmp_path / "model.onnx")
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)  # infers every type anew and compares


def test_lowering_leaves_the_exported_model_as_it_is(lowered, workshop, random_tokens):
    exported = lowered("llama").model
    before = workshop.open(exported, "before").feed(random_tokens(8))
    to_portable(exported, max_seq_len=CAPACITY, dtype="fp16", mask=SLIM)
    assert np.array_equal(workshop.open(exported, "after").feed(random_tokens(8)), before)


def test_a_tied_table_is_stored_once_and_never_transposed_in_the_graph(lowered):
    graph = to_portable(lowered("llama").model, max_seq_len=CAPACITY).graph
    tables = [v for v in graph.initializers.values() if VOCABULARY in v.shape.numpy()]
    (table,) = tables
    assert {node.op_type for node in table.consumers()} == {"Gather", "MatMul"}
    assert table.const_value.numpy().shape == (HIDDEN, VOCABULARY)


def test_a_weight_beyond_the_range_of_float16_is_refused_by_name(lowered):
    exported = lowered("llama").model.clone()
    name, value = next((n, v) for n, v in exported.graph.initializers.items() if n.endswith("down_proj.weight_t"))
    array = value.const_value.numpy().copy()
    array[0, 0] = 1e6
    value.const_value = ir.tensor(array, name=name)
    half = to_portable(exported, max_seq_len=CAPACITY, dtype="fp16").graph.initializers[name]
    with pytest.raises(ExportError, match=r"down_proj.*1e\+06.*bf16"):
        half.const_value.numpy()
    wide = to_portable(exported, max_seq_len=CAPACITY, dtype="bf16").graph.initializers[name]
    assert np.isfinite(wide.const_value.numpy().astype(np.float32)).all()


@pytest.mark.parametrize(
    ("attribute", "named"),
    [
        (ir.AttrInt64("smooth_softmax", 1), "smooth_softmax"),
        (ir.AttrString("k_quant_type", "PER_TENSOR"), "k_quant_type"),
    ],
)
def test_an_attention_that_standard_onnx_cannot_express_is_refused(attribute, named, lowered):
    exported = lowered("llama").model.clone()
    next(n for n in exported.graph if n.op_type == "GroupQueryAttention").attributes[attribute.name] = attribute
    with pytest.raises(UnsupportedModelError, match=named):
        to_portable(exported, max_seq_len=CAPACITY)


def test_an_attention_sink_is_refused(lowered):
    exported = lowered("llama").model.clone()
    attention = next(n for n in exported.graph if n.op_type == "GroupQueryAttention")
    sink = ir.Value(name="sink", const_value=ir.tensor(np.zeros(4, np.float32)))
    exported.graph.register_initializer(sink)
    attention.replace_input_with(11, sink)
    with pytest.raises(UnsupportedModelError, match="sink"):
        to_portable(exported, max_seq_len=CAPACITY)


def test_a_quantised_graph_is_refused_with_the_way_out(lowered):
    from via_sd.export.writer.precision import quantise

    exported = lowered("llama").model.clone()
    quantise(exported, "int4", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=r"MatMulNBits.*--reference"):
        to_portable(exported, max_seq_len=CAPACITY)


def test_an_unknown_dtype_is_refused(lowered):
    with pytest.raises(ValueError, match="int4"):
        to_portable(lowered("llama").model, max_seq_len=CAPACITY, dtype="int4")
