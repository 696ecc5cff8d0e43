"""The Delta criterion, and the two kinds of distributions it compares."""

from __future__ import annotations

import numpy as np
import pytest

from via_sd.masks import CompactDistributions, LookupDistributions, delta_criterion, via_cost
from via_sd.masks.distributions import LOWEST, STEP, log_softmax


def distributions(seed: int, positions: int = 130, vocab: int = 40) -> CompactDistributions:
    kept = CompactDistributions(positions, vocab)
    logits = np.random.default_rng(seed).normal(0, 3, (positions, vocab)).astype(np.float32)
    kept.store(0, log_softmax(logits))
    return kept


def mean_cost(verifier: CompactDistributions, other: CompactDistributions) -> float:
    rows = len(verifier)
    return float(via_cost(verifier.log_probs(0, rows), other.log_probs(0, rows)).mean())


def test_delta_is_what_the_middle_tier_saves() -> None:
    full, slim, drafter = distributions(1), distributions(2), distributions(3)
    delta = delta_criterion(full, slim, drafter, via_cost)
    assert delta.drafter_to_full == pytest.approx(mean_cost(full, drafter))
    assert delta.drafter_to_slim == pytest.approx(mean_cost(slim, drafter))
    assert delta.slim_to_full == pytest.approx(mean_cost(full, slim))
    assert delta.value == delta.drafter_to_full - delta.drafter_to_slim - delta.slim_to_full
    assert delta.to_json() == {
        "drafter_to_full": delta.drafter_to_full,
        "drafter_to_slim": delta.drafter_to_slim,
        "slim_to_full": delta.slim_to_full,
        "positions": 130,
        "value": delta.value,
        "pays": delta.value > 0,
    }


def test_a_tier_that_is_the_full_model_or_the_drafter_saves_nothing() -> None:
    full, drafter = distributions(1), distributions(3)
    assert delta_criterion(full, full, drafter, via_cost).value == pytest.approx(0)
    assert delta_criterion(full, drafter, drafter, via_cost).value == pytest.approx(0)
    assert not delta_criterion(full, full, drafter, via_cost).pays


def test_a_proposed_token_counts_as_all_of_the_drafters_probability() -> None:
    full, slim = distributions(1, positions=3), distributions(2, positions=3)
    lookup = LookupDistributions(np.array([7, -1, 20]), 40)
    delta = delta_criterion(full, slim, lookup, via_cost, positions=lookup.proposed)
    assert delta.positions == 2
    costs = []
    for row, token in ((0, 7), (2, 20)):
        log_q = float(full.log_probs(row, row + 1)[0, token])
        costs.append(max(np.log(0.5) - log_q, 0) + np.exp(log_q) * max(np.log(0.3) - log_q, 0))
    assert delta.drafter_to_full == pytest.approx(np.mean(costs))


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="130, 130 and 5 positions"):
        delta_criterion(distributions(1), distributions(2), distributions(3, positions=5), via_cost)
    nothing = LookupDistributions(np.full(130, -1), 40)
    with pytest.raises(ValueError, match="proposes nothing"):
        delta_criterion(distributions(1), distributions(2), nothing, via_cost, positions=nothing.proposed)


def test_kept_distributions_are_off_by_half_a_step_at_most() -> None:
    logits = np.random.default_rng(0).normal(0, 12, (50, 300)).astype(np.float32)
    exact = log_softmax(logits)
    kept = CompactDistributions(50, 300)
    kept.store(0, exact[:20])
    kept.store(20, exact[20:])
    found = kept.log_probs(0, 50)
    inside = exact > LOWEST
    assert 0.9 < inside.mean() < 1
    assert np.abs(found - exact)[inside].max() <= STEP / 2 + 1e-6
    assert (found[~inside] == np.float32(LOWEST)).all()
    assert (kept.best == logits.argmax(-1)).all()
    assert kept.nbytes == 2 * 50 * 300
