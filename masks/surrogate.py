"""What the evaluations so far say of every unit: a Bayesian linear model of the logarithm of a mask's cost."""

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


def standardised_log(costs: Sequence[float]) -> Vector:
    """log costs with mean 0 and standard deviation 1."""
    logs = np.log(np.asarray(costs) + _NATS)
    centred: Vector = logs - logs.mean()
    return centred / max(float(centred.std()), 1e-9)


@dataclass(frozen=True)
class Surrogate:
    """How much skipping each unit adds to the standardised log cost: a normal distribution over weights."""

    mean: Vector
    factor: Vector  # Cholesky factor of the covariance

    @classmethod
    def fit(cls, records: Sequence[Record], size: int, marginal: Vector | None) -> Surrogate:
        """The posterior of the weights of `size` units.

        Args:
            records: evaluations that skip the whole budget.
            marginal: standardised log cost of skipping each unit alone, if that was measured.
        """
        covariance, mean = np.eye(size) * _OWN_VARIANCE, np.zeros(size)
        if marginal is not None:
            covariance += _SHARED_VARIANCE / size * np.outer(marginal, marginal)
            mean = _SHARED_MEAN * marginal
        if len(records) >= 3:
            precision = np.linalg.inv(covariance)
            target = standardised_log([record.cost for record in records])
            skips = np.zeros((len(records), size))
            for row, record in zip(skips, records, strict=True):
                row[list(record.skipped)] = 1
            skips -= skips.mean(0)
            gram, prior_pull, pull = skips.T @ skips, precision @ mean, skips.T @ target
            noise = 0.3
            for _ in range(5):  # a fixed point: the noise is what the fit leaves over
                covariance = np.linalg.inv(gram / noise + precision)
                mean = covariance @ (pull / noise + prior_pull)
                left = target - skips @ mean
                freedom = len(target) - float(np.trace(covariance @ gram)) / noise
                noise = max(float(left @ left) / max(freedom, len(target) / 4), _NOISE_FLOOR)
        factor = np.linalg.cholesky(covariance + 1e-9 * np.eye(size))
        return cls(mean, np.asarray(factor, np.float64))

    def draw(self, random: np.random.Generator, width: float) -> Vector:
        """Weights drawn from the distribution, `width` times as far from its mean."""
        drawn: Vector = self.mean + width * (self.factor @ random.standard_normal(len(self.mean)))
        return drawn
