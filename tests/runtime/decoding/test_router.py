"""The router's gates against a direct evaluation of their formulas, and how they tighten when audits disagree."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.pipelines import WatchedPipeline, table_pipeline
from tests.support.table_engine import TableEngine, hashed_logits
from via_sd.runtime import GenerationConfig, RequestError
from via_sd.runtime.decoding.router import DivergenceGuard, Gates, MarginGate, Route, RouterMargins
from via_sd.runtime.engines.rows import HostRow
from via_sd.runtime.generation.policy import Policy

VOCAB = 9
ROWS = st.lists(st.floats(-25, 25, width=32), min_size=1, max_size=VOCAB)
ALPHAS = st.one_of(st.sampled_from((0.0, 1.0)), st.floats(0, 1))
TIGHTENING = st.sampled_from((1.0, 0.5, 0.25, 1 / 64))


@given(row=ROWS, token=st.integers(0, VOCAB - 1), alpha1=ALPHAS, alpha2=ALPHAS, tightening=TIGHTENING)
@settings(max_examples=400, derandomize=True, deadline=None)
def test_the_gates_are_the_formulas_of_the_paper(
    row: list[float], token: int, alpha1: float, alpha2: float, tightening: float
) -> None:
    token %= len(row)
    weights = [math.exp(x - max(row)) for x in row]
    probabilities = [w / math.fsum(weights) for w in weights]
    outer = max(probabilities) - (1 - alpha2 * tightening)
    inner = probabilities[token] / max(probabilities) - (1 - alpha1 * tightening)
    certain = (
        max(probabilities) == 1.0
    )  # every other token underflows: both sides of the outer gate are 1 at alpha2 = 0
    assume(abs(outer) > 1e-5 or certain)
    assume(abs(inner) > 1e-5 or token == int(np.argmax(row)))
    wanted = Route.ESCALATE if outer < 0 else Route.ACCEPT if inner >= 0 else Route.REGENERATE
    found = HostRow(np.array(row, np.float32))
    assert Gates(alpha1, alpha2).route(found, token, tightening) is wanted
    assert Gates(alpha1, alpha2).is_sure(found, tightening) == (outer >= 0)


def test_slims_best_token_is_accepted_at_any_inner_threshold() -> None:
    assert Gates(0.0, 1.0).route(HostRow(np.array([1.0, 3.0], np.float32)), 1) is Route.ACCEPT


def test_tokens_equally_likely_pass_the_strictest_inner_gate_together() -> None:
    gates = Gates(0.0, 1.0)
    assert {gates.route(HostRow(np.array([3.0, 3.0], np.float32)), token) for token in (0, 1)} == {Route.ACCEPT}


@pytest.mark.parametrize("bad", [{"alpha1": -0.1}, {"alpha1": 1.01}, {"alpha2": float("nan")}], ids=str)
def test_thresholds_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=r"alpha[12] is .*, wanted 0 to 1"):
        Gates(**bad)


@given(row=ROWS, token=st.integers(0, VOCAB - 1), margin=st.floats(0, 50), tightening=TIGHTENING)
@settings(max_examples=300, derandomize=True, deadline=None)
def test_slims_best_token_stands_where_it_leads_by_the_margin(
    row: list[float], token: int, margin: float, tightening: float
) -> None:
    token %= len(row)
    first, second = [*sorted(row, reverse=True), -math.inf][:2]
    lead = first - second - margin - math.log2(1 / tightening)
    assume(abs(lead) > 1e-9)
    best = int(np.argmax(row))
    wanted = Route.ESCALATE if lead < 0 else Route.ACCEPT if token == best else Route.REGENERATE
    found, gate = HostRow(np.array(row, np.float32)), MarginGate(margin)
    assert gate.route(found, token, tightening) is wanted
    assert gate.is_sure(found, tightening) == (lead >= 0)


@pytest.mark.parametrize(
    ("limit", "margin"), [(0.0, math.inf), (0.009, math.inf), (0.01, 4.0), (0.03, 4.0), (0.05, 1.5), (1.0, 1.5)]
)
def test_a_calibrated_router_takes_the_margin_of_the_largest_share_within_the_limit(
    limit: float, margin: float
) -> None:
    assert RouterMargins(0.05, {0.05: 1.5, 0.01: 4.0}).gate(limit) == MarginGate(margin)


def calibrated_pipeline(directory: Path, margins: dict[float, float]) -> WatchedPipeline:
    """Slim is often wrong here, and drafts are, too."""
    policy = Policy({"mode": "plain"}, "plain", {1: 1.0, 8: 1.2}, router=RouterMargins(0.1, margins))
    return table_pipeline(TableEngine(hashed_logits(VOCAB, slim=0.7), VOCAB), directory, policy=policy)


def test_the_wider_the_calibrated_margin_the_less_stands_on_slims_word(tmp_path: Path) -> None:
    pipeline = calibrated_pipeline(tmp_path, {0.01: 4.0, 0.1: 1.0, 0.5: 0.0})

    def counts(limit: float) -> tuple[int, float]:
        audited, apart = 0, 0.0
        for prompt in ("abc", "cab", "hhg", "fed"):
            stats = pipeline.generate(
                prompt, mode="routed", router="calibrated", raw=True, max_new_tokens=120, max_divergence=limit,
                audit_tail=True,
            ).stats  # fmt: skip
            audited += stats.divergence.checked
            apart += stats.divergence.disagreed
        return audited, apart / max(1, audited)

    pipeline.verifier.buffers.clear()
    shut = counts(0.0)
    assert {call.tier for kv in pipeline.verifier.buffers for call in kv.calls} == {"full"}, "slim was asked in vain"
    narrow, loose = counts(0.01), counts(0.5)
    assert shut == (0, 0.0)
    assert 0 < narrow[0] < loose[0]
    assert narrow[1] < loose[1]


def test_without_a_limit_of_its_own_a_request_keeps_to_the_calibration_s(tmp_path: Path) -> None:
    pipeline = calibrated_pipeline(tmp_path, {0.01: 4.0, 0.1: 1.0})
    resolved = pipeline.resolve(GenerationConfig(mode="routed", router="calibrated"))
    assert (resolved.max_divergence, pipeline.router(resolved)) == (0.1, MarginGate(1.0))
    stricter = pipeline.resolve(GenerationConfig(mode="routed", router="calibrated", max_divergence=0.02))
    assert pipeline.router(stricter) == MarginGate(4.0)


def test_the_calibrated_router_is_refused_where_nothing_was_calibrated(tmp_path: Path) -> None:
    pipeline = table_pipeline(TableEngine(hashed_logits(VOCAB), VOCAB), tmp_path)
    with pytest.raises(RequestError, match="via-sd-export calibrate --max-divergence"):
        pipeline.stream("abc", mode="routed", router="calibrated", raw=True)
    with pytest.raises(RequestError, match="thresholds of the routers paper and adaptive"):
        pipeline.stream("abc", mode="routed", router="calibrated", alpha2=0.5, raw=True)


@given(blocks=st.lists(st.lists(st.sampled_from((0.0, 0.3, 1.0)), max_size=8), max_size=40), limit=st.floats(0, 1))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_the_guard_tightens_where_more_differs_than_the_limit_explains(blocks: list[list[float]], limit: float) -> None:
    guard, expected = DivergenceGuard(limit, memory=16), 1.0
    history: list[float] = []
    for block in blocks:
        history += block
        guard.audited(block)
        if block:
            weights = [(1 - 1 / 16) ** age for age in range(len(history))]
            found = math.fsum(w * v for w, v in zip(weights, reversed(history), strict=True))
            allowed = limit * math.fsum(weights)
            most = allowed + math.sqrt(allowed) + 0.5
            assume(abs(found - most) > 1e-9)
            expected = max(1 / 64, expected / 2) if found > most else min(1.0, expected * 2)
        assert guard.tightening == expected


def test_the_guard_tightens_above_the_limit_and_loosens_again_below_it() -> None:
    guard = DivergenceGuard(0.1, memory=16)
    guard.audited([1.0] * 4)
    assert guard.tightening == 0.5
    for _ in range(20):
        guard.audited([1.0])
    tightest = guard.tightening
    assert 0 < tightest < 0.05
    for _ in range(200):
        guard.audited([0.0])
    assert guard.tightening == 1.0


def test_what_chance_brings_at_the_limit_tightens_seldom_and_three_times_as_much_soon() -> None:
    def share_tightened(rate: float, tokens: int = 128) -> float:
        """Share of texts of so many tokens in which the guard tightened, where tokens differ at `rate`."""
        random = np.random.default_rng(0)
        tightened = 0
        for _ in range(300):
            guard = DivergenceGuard(0.02)
            audits = [random.random(8) < rate for _ in range(tokens // 8)]
            for audit in audits:
                guard.audited(audit.astype(float).tolist())
                if guard.tightening < 1:
                    tightened += 1
                    break
        return tightened / 300

    assert share_tightened(0.01) < 0.2
    assert share_tightened(0.06) > 0.8
    assert share_tightened(0.06, tokens=512) > 0.98


def test_without_a_limit_nothing_tightens() -> None:
    guard = DivergenceGuard(None)
    guard.audited([1.0] * 50)
    assert guard.tightening == 1.0


def test_a_limit_on_divergence_lowers_it(tmp_path: Path) -> None:
    # Slim is often wrong here, so that loose gates let much of it through.
    pipeline = table_pipeline(TableEngine(hashed_logits(VOCAB, slim=0.7), VOCAB), tmp_path)

    def divergence(limit: float | None) -> float:
        disagreed = emitted = 0.0
        for prompt in ("abc", "cab", "hhg", "fed", "dig", "big", "bad", "fig"):
            found = pipeline.generate(
                prompt, mode="routed", raw=True, max_new_tokens=120, alpha2=0.9, alpha1=0.9, max_divergence=limit,
                audit_tail=True, max_lag=24, router="paper",
            )  # fmt: skip
            disagreed += found.stats.divergence.disagreed
            emitted += found.stats.emitted_tokens
        return disagreed / emitted

    loose, limited, strict = divergence(None), divergence(0.1), divergence(0.02)
    assert loose > 0.2
    assert strict <= limited < 0.6 * loose
