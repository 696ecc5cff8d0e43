"""What the evaluations so far say of every choice that masks make: Bayesian linear models of what a mask costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from via_sd.masks.ledger import Record

Vector = NDArray[np.float64]

#: Added to costs before their logarithm is taken: differences below this many nats mean nothing.
_NATS = 1e-3
#: Prior of the weights of standardised log costs: variance of each, and of their common multiple of the marginal costs
#: around what is expected of it. Units differ mostly as they do alone, so the multiple is left free.
_OWN_VARIANCE, _SHARED_VARIANCE, _SHARED_MEAN = 1.0, 9.0, 0.3
#: Least variance of a log cost around the model: the model is linear and the cost is not.
_NOISE_FLOOR = 0.05
#: Prior of the factors by which choices add more than they do alone: variance of each and of their common part; least
#: variance of a cost around the model, over the square of a mean cost.
_OWN_FACTOR, _SHARED_FACTOR, _ADDITIVE_NOISE_FLOOR = 0.25, 1.0, 0.01


def standardised_log(costs: Sequence[float]) -> Vector:
    """log costs with mean 0 and standard deviation 1."""
    logs = np.log(np.asarray(costs) + _NATS)
    centred: Vector = logs - logs.mean()
    return centred / max(float(centred.std()), 1e-9)


@dataclass(frozen=True)
class Surrogate:
    """How much each choice adds to what a mask costs: a normal distribution over weights."""

    mean: Vector
    factor: Vector  # with its transpose, the covariance

    @classmethod
    def of_log_costs(cls, records: Sequence[Record], size: int, marginal: Vector | None) -> Surrogate:
        """Weights of `size` units in the standardised log cost: skipping a second layer costs more than the first.

        Args:
            records: evaluations that skip the whole budget.
            marginal: standardised log cost of skipping each unit alone, if that was measured.
        """
        covariance, mean = np.eye(size) * _OWN_VARIANCE, np.zeros(size)
        if marginal is not None:
            covariance += _SHARED_VARIANCE / size * np.outer(marginal, marginal)
            mean = _SHARED_MEAN * marginal
        if len(records) >= 3:
            choices = _choices(records, size)
            target = standardised_log([record.cost for record in records])
            mean, covariance = _posterior(choices - choices.mean(0), target, mean, covariance, _NOISE_FLOOR)
        return cls(mean, _root(covariance))

    @classmethod
    def of_costs(cls, records: Sequence[Record], marginal: Vector) -> Surrogate:
        """Weights of choices in the cost: what each costs alone, times a factor of its own around a common one.

        Args:
            records: evaluations of complete masks.
            marginal: cost of each choice alone.
        """
        scale = max(float(np.mean([record.cost for record in records])), _NATS)
        alone = np.maximum(marginal, _NATS) / scale
        size = len(marginal)
        mean, covariance = np.ones(size), np.eye(size) * _OWN_FACTOR + _SHARED_FACTOR
        choices = _choices(records, size) * alone
        target = np.array([record.cost for record in records]) / scale
        mean, covariance = _posterior(choices, target, mean, covariance, _ADDITIVE_NOISE_FLOOR)
        return cls(mean * alone, alone[:, None] * _root(covariance))

    def draw(self, random: np.random.Generator, width: float) -> Vector:
        """Weights drawn from the distribution, `width` times as far from its mean."""
        drawn: Vector = self.mean + width * (self.factor @ random.standard_normal(len(self.mean)))
        return drawn


def _choices(records: Sequence[Record], size: int) -> Vector:
    """One row per record: 1 for each of `size` choices that it makes."""
    choices = np.zeros((len(records), size))
    for row, record in zip(choices, records, strict=True):
        row[list(record.selection)] = 1
    return choices


def _posterior(
    choices: Vector, target: Vector, prior_mean: Vector, prior_covariance: Vector, noise_floor: float
) -> tuple[Vector, Vector]:
    """Mean and covariance of the weights w of target = choices @ w + noise, given those of the prior."""
    precision = np.linalg.inv(prior_covariance)
    gram, prior_pull, pull = choices.T @ choices, precision @ prior_mean, choices.T @ target
    mean, covariance, noise = prior_mean, prior_covariance, 0.3
    for _ in range(5):  # a fixed point: the noise is what the fit leaves over
        covariance = np.linalg.inv(gram / noise + precision)
        mean = covariance @ (pull / noise + prior_pull)
        left = target - choices @ mean
        freedom = len(target) - float(np.trace(covariance @ gram)) / noise
        noise = max(float(left @ left) / max(freedom, len(target) / 4), noise_floor)
    return mean, covariance


def _root(covariance: Vector) -> Vector:
    return np.asarray(np.linalg.cholesky(covariance + 1e-9 * np.eye(len(covariance))), np.float64)
