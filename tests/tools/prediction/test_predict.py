"""Predictions: a replay makes the very passes that the model would make, and adds up what they take."""

from __future__ import annotations

from pathlib import Path

import pytest

from via_sd.contract.graphs import FULL
from via_sd.runtime import Pipeline
from via_sd.tools.prediction import Costs, Forecast, Predictor, SyntheticTier, record_texts, summarise_forecasts

pytest.importorskip("onnxruntime")

PROMPTS = ["abc abc abc", "the thing in the end", "one two three one two three one"]
LENGTH = 24
#: Latencies as no machine has them, so that a pass that is left out or counted twice shows.
FULL_MS = {1: 7.0, 2: 8.0, 64: 70.0}
TIER_MS = {1: 2.0, 2: 2.5, 64: 33.5}


def costs_of(pipeline: Pipeline) -> Costs:
    ms = {tier: FULL_MS if tier == FULL else TIER_MS for tier in (*pipeline.verifier.tiers, "drafter")}
    relative = [{size: time / FULL_MS[1] for size, time in curve.items()} for curve in (FULL_MS, TIER_MS)]
    return Costs(ms, *relative, pipeline.model.costs.draft or None)


@pytest.fixture(params=["tiny_bundle", "tiny_bundle_mask_drafter", "tiny_bundle_model_drafter"])
def pipeline(request: pytest.FixtureRequest) -> Pipeline:
    bundle: Path = request.getfixturevalue(request.param)
    return Pipeline.load(bundle, policy=False, retained_slots=0, threads=1)


def predictor_of(pipeline: Pipeline) -> Predictor:
    texts = [
        pipeline.generate(prompt, mode="plain", max_new_tokens=LENGTH, ignore_eos=True).token_ids for prompt in PROMPTS
    ]
    traces = record_texts(pipeline, PROMPTS, texts)
    assert [list(trace.text) for trace in traces] == texts
    return Predictor(pipeline.bundle, pipeline.verifier, pipeline.drafter, traces, costs_of(pipeline), None)


@pytest.mark.parametrize("mode", ["plain", "speculative"])
def test_two_tiers_make_the_very_passes_that_were_predicted(pipeline: Pipeline, mode: str) -> None:
    for prompt, forecast in zip(PROMPTS, predictor_of(pipeline).forecast({"mode": mode}), strict=True):
        stats = pipeline.generate(prompt, mode=mode, max_new_tokens=LENGTH, ignore_eos=True).stats
        assert forecast.passes["full"] == stats.full_calls - 1
        tier = {"mask": "deep"}.get(pipeline.bundle.manifest["drafter"]["kind"], "drafter")
        if mode == "speculative" and pipeline.bundle.manifest["drafter"]["kind"] != "ngram":
            assert forecast.passes[tier] == pytest.approx(stats.draft_calls, abs=2)  # the reading of the prompt is none


def test_a_cascade_makes_about_the_passes_that_were_predicted(pipeline: Pipeline) -> None:
    """What slim says behind a token that full will reject is not on record: it is taken to go on as along the text."""
    for prompt, forecast in zip(PROMPTS, predictor_of(pipeline).forecast({"mode": "cascade"}), strict=True):
        stats = pipeline.generate(prompt, mode="cascade", max_new_tokens=LENGTH, ignore_eos=True).stats
        assert forecast.passes["full"] == pytest.approx(stats.full_calls - 1, abs=2)
        assert forecast.passes.get("slim", 0) == pytest.approx(stats.slim_calls, rel=0.5, abs=4)


def test_plain_decoding_takes_a_pass_over_one_token_each(pipeline: Pipeline) -> None:
    assert predictor_of(pipeline).forecast({"mode": "plain"}) == [
        Forecast(pytest.approx(1e3 / FULL_MS[1]), {"full": LENGTH - 1})
    ] * len(PROMPTS)


def test_a_synthetic_slim_verifier_is_worth_what_it_agrees(tiny_bundle: Path) -> None:
    predictor = predictor_of(Pipeline.load(tiny_bundle, policy=False, threads=1))
    speeds = []
    for acceptance in (0.0, 0.8, 1.0):
        found = predictor.with_slim(SyntheticTier(acceptance, 0.1)).forecast({"mode": "cascade"})
        speeds.append(sum(forecast.tokens_per_s for forecast in found))
    assert speeds == sorted(speeds)
    plain = sum(forecast.tokens_per_s for forecast in predictor.forecast({"mode": "plain"}))
    assert speeds[2] > 2 * plain
    assert speeds[0] < speeds[2] / 2


def test_a_synthetic_drafter_is_asked_in_place_of_the_bundles_own(pipeline: Pipeline) -> None:
    found = predictor_of(pipeline).with_drafter(SyntheticTier(1.0, 0.05)).forecast({"mode": "speculative"})
    for forecast in found:
        assert forecast.passes["full"] <= LENGTH / 2
        assert forecast.passes["full"] + forecast.passes["synthetic"] == LENGTH - 1
        assert set(forecast.passes) == {"full", "synthetic"}


def test_figures_are_means_over_the_prompts_of_a_bucket() -> None:
    forecasts = {"fast": [Forecast(20.0, {}), Forecast(40.0, {}), Forecast(30.0, {})]}
    plain = [Forecast(10.0, {}), Forecast(10.0, {}), Forecast(30.0, {})]
    found = summarise_forecasts(forecasts, plain, ["a", "a", "b"])
    assert found["fast"]["a"]["tokens_per_s"] == pytest.approx(800**0.5)
    assert found["fast"]["a"]["over_plain"] == pytest.approx(8**0.5)
    assert found["fast"]["b"] == pytest.approx({"tokens_per_s": 30.0, "over_plain": 1.0})
    assert found["fast"]["all"]["over_plain"] == pytest.approx(2.0)
