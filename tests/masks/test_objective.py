"""The mask objectives agree with their formulas, and are zero where slim is full."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from via_sd.masks import OBJECTIVES, flipped_via_cost, forward_kl, objective_by_name, via_cost
from via_sd.masks.objective import Array

alphas = st.floats(0, 0.999)
betas = st.floats(0.001, 1)
seeds = st.integers(0, 2**32 - 1)


def distributions(seed: int, positions: int = 7, vocab: int = 50, spread: float = 4.0) -> tuple[Array, Array]:
    """Log-probabilities of a full model and of a slim one that is near it at some positions and far at others."""
    rng = np.random.default_rng(seed)
    full = rng.normal(0, spread, (positions, vocab))
    slim = full + rng.normal(0, 1, (positions, vocab)) * rng.choice([0.01, 0.5, 5.0], (positions, 1))
    return log_softmax(full), log_softmax(slim)


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def by_definition(log_full: Array, log_slim: Array, alpha: float, beta: float, sign: int = 1) -> Array:
    """R one position and one token at a time, in float64."""
    costs = []
    for row_full, row_slim in zip(log_full.astype(np.float64), log_slim.astype(np.float64), strict=True):
        cost = 0.0
        for full, slim in zip(row_full, row_slim, strict=True):
            z1 = np.log(1 - alpha) + slim - full
            z2 = np.log(beta) + sign * (slim - full)
            cost += np.exp(slim) * max(z1, 0.0) + np.exp(full) * max(z2, 0.0)
        costs.append(cost)
    return np.array(costs)


@settings(max_examples=60, deadline=None)
@given(seeds, alphas, betas)
def test_both_signs_of_the_objective_equal_the_definition(seed: int, alpha: float, beta: float) -> None:
    full, slim = distributions(seed)
    wanted = by_definition(full, slim, alpha, beta)
    np.testing.assert_allclose(via_cost(full, slim, alpha=alpha, beta=beta), wanted, rtol=1e-9, atol=1e-12)
    wanted = by_definition(full, slim, alpha, beta, sign=-1)
    np.testing.assert_allclose(flipped_via_cost(full, slim, alpha=alpha, beta=beta), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("vocab", [5, 3000])
def test_float32_log_probabilities_are_good_to_six_digits(vocab: int) -> None:
    full, slim = distributions(3, positions=40, vocab=vocab)
    narrow = full.astype(np.float32), slim.astype(np.float32)
    np.testing.assert_allclose(via_cost(*narrow), by_definition(*narrow, 0.5, 0.3), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(flipped_via_cost(*narrow), by_definition(*narrow, 0.5, 0.3, -1), rtol=1e-6, atol=1e-7)
    wide = [a.astype(np.float64) for a in narrow]
    kl = (np.exp(wide[0]) * (wide[0] - wide[1])).sum(-1)
    np.testing.assert_allclose(forward_kl(*narrow), kl, rtol=1e-6, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(seeds, alphas, betas, st.sampled_from(sorted(OBJECTIVES)))
def test_a_slim_verifier_equal_to_full_costs_nothing_anywhere_in_the_domain(
    seed: int, alpha: float, beta: float, name: str
) -> None:
    full, _ = distributions(seed)
    assert objective_by_name(name, alpha=alpha, beta=beta)(full, full).tolist() == [0.0] * len(full)


@settings(max_examples=40, deadline=None)
@given(seeds, alphas, betas, st.sampled_from(sorted(OBJECTIVES)))
def test_the_order_of_the_vocabulary_does_not_matter(seed: int, alpha: float, beta: float, name: str) -> None:
    full, slim = distributions(seed)
    order = np.random.default_rng(seed).permutation(full.shape[1])
    cost = objective_by_name(name, alpha=alpha, beta=beta)
    np.testing.assert_allclose(cost(full[:, order], slim[:, order]), cost(full, slim), rtol=1e-12, atol=1e-15)


def test_at_alpha_0_and_beta_1_every_excess_counts_in_full() -> None:
    full, slim = distributions(5)
    excess = np.maximum(slim - full, 0)
    wanted = (np.exp(slim) * excess + np.exp(full) * excess).sum(-1)
    np.testing.assert_allclose(via_cost(full, slim, alpha=0, beta=1), wanted, rtol=1e-12)
    near = via_cost(full, slim, alpha=1e-9, beta=1 - 1e-9)
    np.testing.assert_allclose(near, wanted, rtol=1e-6)


def test_towards_alpha_1_and_beta_0_the_objective_tolerates_everything() -> None:
    full, slim = distributions(5)
    assert via_cost(full, slim, alpha=1 - 1e-15, beta=1e-15).max() < via_cost(full, slim).max() / 10
    tolerances = [via_cost(full, slim, alpha=a, beta=1 - a).sum() for a in (0.0, 0.3, 0.6, 0.9, 0.999)]
    assert tolerances == sorted(tolerances, reverse=True)


def test_the_objective_sees_invented_tokens_and_the_flipped_one_also_missed_ones() -> None:
    full = np.log(np.array([[0.5, 0.25, 0.25]]))
    missed = np.log(np.array([[0.5, 0.499, 0.001]]))  # the third token is missed; the others gain less than twofold
    assert via_cost(full, missed, alpha=0.5, beta=0.3)[0] == 0
    assert flipped_via_cost(full, missed, alpha=0.5, beta=0.3)[0] == pytest.approx(0.25 * np.log(0.3 * 250))


def test_tokens_that_cannot_occur_cost_nothing_unless_slim_invents_them() -> None:
    with np.errstate(divide="ignore"):
        full = np.log(np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]))
        slim = np.log(np.array([[0.9, 0.1, 0.0], [0.4, 0.4, 0.2]]))
    for cost in (via_cost, flipped_via_cost):
        assert np.isfinite(cost(full, slim)[0])
        assert cost(full, slim)[1] == np.inf
    assert forward_kl(full, slim)[0] == pytest.approx(0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(5))
    assert forward_kl(slim, full)[1] == np.inf


def test_the_one_hot_law_of_a_lookup_drafter_has_a_finite_cost() -> None:
    full = np.log(np.array([[0.1, 0.6, 0.3]]))
    with np.errstate(divide="ignore"):
        draft = np.log(np.array([[1.0, 0.0, 0.0]]))
    wanted = np.log(0.5 / 0.1) + 0.1 * np.log(0.3 / 0.1)
    assert via_cost(full, draft)[0] == pytest.approx(wanted)


def test_half_precision_is_widened_before_anything_is_computed() -> None:
    full, slim = (a.astype(np.float16) for a in distributions(2, vocab=2000))
    wide = full.astype(np.float32), slim.astype(np.float32)
    np.testing.assert_array_equal(via_cost(full, slim), via_cost(*wide))


@pytest.mark.parametrize(("alpha", "beta"), [(-0.1, 0.3), (1.0, 0.3), (0.5, 0.0), (0.5, 1.1), (float("nan"), 0.3)])
def test_parameters_outside_the_domain_are_refused(alpha: float, beta: float) -> None:
    with pytest.raises(ValueError, match="wanted 0"):
        objective_by_name("via", alpha=alpha, beta=beta)


def test_an_unknown_objective_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="via, via-flipped, kl"):
        objective_by_name("jensen")


def test_arrays_of_different_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(1, 3\)"):
        via_cost(np.zeros((2, 3)), np.zeros((1, 3)))
