"""The exporter's check of itself: it passes what is right and stops what is wrong."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from via_sd.export import ExportError, export_bundle
from via_sd.export.passes import AttentionSemanticsPass
from via_sd.export.sources.reference import load_reference
from via_sd.export.writer.check import check_logits, compare_logits, log_softmax, reference_logits
from via_sd.export.writer.precision import quantise
from via_sd.export.writer.stepper import Stepper


def scaled(model: ir.Model, name: str, factor: float) -> ir.Model:
    """A copy with one weight matrix scaled."""
    copy = model.clone()
    weight = next(v for key, v in copy.graph.initializers.items() if name in key)
    weight.const_value = ir.tensor(weight.const_value.numpy() * factor, name=weight.name)
    return copy


def test_a_right_graph_passes(lowered, llama_reference, workshop):
    result = check_logits(Stepper(workshop.save(lowered("llama").model, "right")), llama_reference, quantised=False)
    assert result.positions == 47
    assert result.max_abs_difference < 1e-5
    assert result.mean_kl < 1e-9
    assert result.top1_agreement == 1.0


def test_one_matrix_that_is_a_percent_off_is_caught(lowered, llama_reference, workshop):
    """Greedy text would hardly show it."""
    wrong = workshop.save(scaled(lowered("llama").model, "layers.3.mlp.down_proj", 1.01), "wrong")
    with pytest.raises(ExportError, match=r"differs from transformers by .* this architecture is not exported right"):
        check_logits(Stepper(wrong), llama_reference, quantised=False)


def test_a_missing_window_is_caught_because_the_check_reads_beyond_it(checkpoint_of, lowered, workshop):
    checkpoint = lowered("mistral")
    reference = reference_logits(lambda: load_reference(checkpoint_of("mistral")), 128, checkpoint.config)
    assert reference.chunks[0] > checkpoint.config["sliding_window"]
    check_logits(Stepper(workshop.save(checkpoint.model, "right")), reference, quantised=False)
    blind = checkpoint.model.clone()
    AttentionSemanticsPass({**checkpoint.config, "sliding_window": None}, 128)(blind)
    with pytest.raises(ExportError, match="differs from transformers"):
        check_logits(Stepper(workshop.save(blind, "blind")), reference, quantised=False)


def test_a_quantised_graph_passes_and_a_ruined_one_does_not(lowered, llama_reference, workshop):
    model = lowered("llama").model.clone()
    quantise(model, "int4", lambda *_: None)
    result = check_logits(Stepper(workshop.save(model, "int4")), llama_reference, quantised=True)
    assert 1e-4 < result.mean_kl < 1
    ruined = scaled(lowered("llama").model, "embed_tokens", 40.0)
    with pytest.raises(ExportError, match=r"nats \(KL\) from transformers, limit 3.0"):
        check_logits(Stepper(workshop.save(ruined, "ruined")), llama_reference, quantised=True)


def test_a_capacity_shorter_than_the_usual_text_is_checked_too(checkpoint_of, lowered):
    reference = reference_logits(lambda: load_reference(checkpoint_of("llama")), 16, lowered("llama").config)
    assert sum(reference.chunks) == len(reference.tokens) <= 16


@pytest.mark.parametrize("capacity", [2, 7, 40, 41, 47, 48])
def test_every_capacity_can_be_exported_and_checked(capacity, checkpoint_of, tmp_path):
    assert export_bundle(checkpoint_of("llama"), tmp_path / "b", max_seq_len=capacity).is_dir()


def test_a_nan_is_an_infinite_difference():
    logits = np.zeros((2, 4), np.float32)
    broken = logits.copy()
    broken[1, 2] = np.nan
    result = compare_logits(broken, logits)
    assert result.max_abs_difference == result.mean_kl == float("inf")


def test_kl_is_in_nats_from_the_reference():
    wanted, found = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    assert compare_logits(found, wanted).mean_kl == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))
    assert np.exp(log_softmax(np.array([[1e4, 0.0]], np.float32))) == pytest.approx(np.array([[1.0, 0.0]]))
