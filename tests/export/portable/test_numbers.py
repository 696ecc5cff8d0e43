"""The numbers a portable graph computes of its logits, in ONNX Runtime, against the long way in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from via_sd.export import UnsupportedModelError
from via_sd.export.portable.numbers import RowNumbersPass

VOCAB = 11
#: Few values, so that several tokens are often equal.
LOGITS = st.one_of(st.sampled_from((-30.0, 0.0, 2.5, 30.0)), st.floats(-60, 60, width=32))


def graph(vocabulary: int | str) -> ir.Model:
    """A graph whose output `logits` is its input `given`."""
    shape = ir.Shape(["batch", "rows", vocabulary])
    given = ir.Value(name="given", type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
    node = ir.node("Identity", [given])
    logits = node.outputs[0]
    logits.name, logits.type, logits.shape = "logits", given.type, shape
    return ir.Model(ir.Graph([given], [logits], nodes=[node], opset_imports={"": 24}, name="numbers"), ir_version=11)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> ort.InferenceSession:
    path: Path = tmp_path_factory.mktemp("numbers") / "model.onnx"
    ir.save(RowNumbersPass()(graph(VOCAB)).model, path)
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"])


@settings(max_examples=300, derandomize=True, deadline=None)
@given(data=st.data(), batch=st.integers(1, 2), rows=st.integers(1, 4))
def test_they_are_the_first_best_token_the_mass_the_gap_and_the_margin(session, data, batch, rows):
    def several(values: st.SearchStrategy, count: int) -> list:
        return data.draw(st.lists(values, min_size=count, max_size=count))

    logits = np.array(several(LOGITS, batch * rows * VOCAB), np.float32).reshape(batch, rows, VOCAB)
    candidates = np.array(several(st.integers(0, VOCAB - 1), batch * rows)).reshape(batch, rows)
    (numbers,) = session.run(["row_numbers"], {"given": logits, "candidates": candidates})
    below = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    assert (numbers[..., 0] == logits.argmax(-1)).all()
    np.testing.assert_allclose(numbers[..., 1], np.exp(below).sum(-1), rtol=1e-5)
    wanted = np.take_along_axis(below, candidates[..., None], -1)[..., 0]
    np.testing.assert_allclose(numbers[..., 2], wanted, rtol=1e-6, atol=1e-6)
    second, first = np.sort(logits.astype(np.float64), -1)[..., -2:].transpose(2, 0, 1)
    np.testing.assert_allclose(numbers[..., 3], first - second, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_logit_that_is_no_number_shows_in_the_mass(session, bad):
    logits = np.zeros((1, 1, VOCAB), np.float32)
    logits[0, 0, 3] = bad
    (numbers,) = session.run(["row_numbers"], {"given": logits, "candidates": np.zeros((1, 1), np.int64)})
    assert not numbers[0, 0, 1] >= 1


@pytest.mark.parametrize("vocabulary", ["vocab", (1 << 24) + 1])
def test_a_vocabulary_that_a_float32_cannot_number_is_refused(vocabulary):
    with pytest.raises(UnsupportedModelError, match="wanted at most 16777216"):
        RowNumbersPass()(graph(vocabulary))
