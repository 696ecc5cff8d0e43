"""A pass is cut into steps the engines were built for, and the steps together compute what the pass would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from via_sd.runtime import BundleError
from via_sd.runtime.engines.steps import VISIBLE_BUCKET, StepPlanner


def profile(name: str, tokens: list[int], rows: list[int], capacity: int) -> dict[str, Any]:
    return {"name": name, "tokens": tokens, "rows": rows, "visible": [1, capacity, capacity]}


def joint(capacity: int, verify: int = 24, chunk: int = 64) -> StepPlanner:
    return StepPlanner([profile("any", [1, 8, chunk], [1, 8, verify], capacity)], capacity)


def separate(capacity: int, verify: int = 24, chunk: int = 64) -> StepPlanner:
    profiles = [
        profile("step", [1, 1, 2], [1, 1, 2], capacity),
        profile("verify", [1, 8, verify], [1, 8, verify], capacity),
        profile("prefill", [1, 32, chunk], [1, 1, 2], capacity),
    ]
    return StepPlanner(profiles, capacity)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from([joint, separate]), st.integers(1, 300), st.integers(1, 300), st.integers(0, 200))
def test_steps_cover_the_pass_keep_the_rows_asked_for_and_fit_a_profile(make, count, rows, past):
    planner = make(1024)
    rows = min(rows, count)
    steps = planner.cut(count, rows)
    assert [token for step in steps for token in range(step.start, step.start + step.count)] == list(range(count))
    kept = [row for step in steps for row in range(step.start + step.count - step.keep, step.start + step.count)]
    assert kept == list(range(count - rows, count))
    judged = [candidate for step in steps if step.keep for candidate in step.candidates(range(1, count + 1))]
    assert judged == [*range(count - rows + 2, count + 1), 0]
    for step in steps:
        assert step.rows[-1] == step.count - 1
        assert len(step.rows) == max(1, step.keep)
        end = past + step.start + step.count
        visible = planner.visible(end)
        assert end <= visible <= planner.max_seq_len
        assert visible % VISIBLE_BUCKET == 0 or visible == planner.max_seq_len
        planner.profile(step.count, len(step.rows), visible)


def test_a_pass_that_fits_is_one_step():
    for planner in (joint(1024), separate(1024)):
        assert len(planner.cut(1, 1)) == len(planner.cut(24, 24)) == len(planner.cut(64, 1)) == 1


def test_each_size_of_step_gets_the_profile_made_for_it():
    planner = separate(1024)
    assert [planner.profile(count, rows, 256) for count, rows in ((1, 1), (9, 9), (3, 1), (64, 1))] == [0, 1, 1, 2]


def test_a_step_that_no_profile_takes_says_which_there_are():
    planner = StepPlanner([profile("verify", [4, 8, 24], [4, 8, 24], 512)], 512)
    with pytest.raises(
        BundleError, match=r"step of 1 tokens and 1 rows: built were verify \(4 to 24 tokens.*smaller MIN"
    ):
        planner.profile(1, 1, 256)


@pytest.mark.parametrize("make", [joint, separate])
def test_the_steps_of_a_pass_compute_what_one_step_would(make, tiny_bundle, tmp_path):
    """With the portable graph in ONNX Runtime in place of its engine: the inputs of every step are the same."""
    ort = pytest.importorskip("onnxruntime")
    ir = pytest.importorskip("onnx_ir")
    from via_sd.export.portable import to_portable

    capacity, path = 256, tmp_path / "full.onnx"
    model = to_portable(ir.load(tiny_bundle / "verifier/model.onnx"), max_seq_len=capacity)
    ir.save(model, path, external_data="full.data")
    tokens = np.random.default_rng(0).integers(0, 200, 130)
    wanted = run(ort, path, tokens, StepPlanner([profile("any", [1, 8, 256], [1, 8, 256], capacity)], capacity), 130)
    found = run(ort, path, tokens, make(capacity, verify=24, chunk=64), 70)
    assert np.abs(found - wanted[-70:]).max() < 1e-4


def run(ort: Any, path: Path, tokens: np.ndarray, planner: StepPlanner, rows: int) -> np.ndarray:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    caches = {
        value.name: np.zeros((1, *value.shape[1:]), np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past_key_values.")
    }
    logits = []
    for step in planner.cut(len(tokens), rows):
        stop = step.start + step.count
        feeds = {
            "input_ids": tokens[None, step.start : stop],
            "position_ids": np.arange(step.start, stop)[None],
            "cache_slots": np.arange(planner.visible(stop)),
            "logit_rows": np.array(step.rows),
            "candidates": np.array([step.candidates(tokens.tolist())]),
        }
        result = dict(zip(names, session.run(None, {**feeds, **caches}), strict=True))
        caches = {name: result[name.replace("past_key_values", "present")] for name in caches}
        logits.append(result["logits"][0][len(step.rows) - step.keep :])
    return np.concatenate(logits)
