"""The probabilities the runtime should compute, by brute force in float64, and tests of draws against them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from scipy import stats

from via_sd.runtime import GenerationConfig


def brute_force_probabilities(logits: Sequence[float], params: GenerationConfig, seen: Iterable[int]) -> list[float]:
    """The processed probabilities of one row: penalty, temperature, top-k, top-p, min-p, one token at a time."""
    values = [float(x) for x in logits]
    for token in set(seen):
        values[token] *= 1 / params.repetition_penalty if values[token] > 0 else params.repetition_penalty
    if params.top_k:
        floor = sorted(values, reverse=True)[min(params.top_k, len(values)) - 1]
        values = [x if x >= floor else -math.inf for x in values]
    peak = max(values)
    weights = [math.exp((x - peak) / params.temperature) for x in values]
    total = math.fsum(weights)
    probabilities = [w / total for w in weights]
    kept, mass = set(), 0.0
    for token in sorted(range(len(probabilities)), key=lambda t: (-probabilities[t], t)):
        if mass >= params.top_p:
            break
        kept.add(token)
        mass += probabilities[token]
    probabilities = [
        p if t in kept and p >= params.min_p * max(probabilities) else 0.0 for t, p in enumerate(probabilities)
    ]
    total = math.fsum(probabilities)
    return [p / total for p in probabilities]


class Tally:
    """Counts of drawn tokens against their distributions, apart per `cell` of contexts.

    Distributions may differ within a cell: observed minus expected is then still a sum of martingale differences, and
    its variance at most what the chi-square test takes it for.
    """

    def __init__(self, vocab_size: int) -> None:
        self._observed: dict[Hashable, np.ndarray] = defaultdict(lambda: np.zeros(vocab_size))
        self._expected: dict[Hashable, np.ndarray] = defaultdict(lambda: np.zeros(vocab_size))
        self.impossible = 0

    def add(self, cell: Hashable, token: int, probabilities: Sequence[float] | np.ndarray) -> None:
        self._observed[cell][token] += 1
        self._expected[cell] += probabilities
        self.impossible += probabilities[token] <= 0

    @property
    def count(self) -> int:
        return int(sum(cell.sum() for cell in self._observed.values()))

    def p_value(self, shift: float = 0.0) -> float:
        """Of two tests together; `shift` moves that much probability to the likeliest token of each.

        The chi-square test sees any difference. The other counts how often the likeliest tokens came, in all cells
        together: it sees a small difference in their favour, or against them, in far fewer draws.
        """
        statistic, freedom = 0.0, 0
        excess, variance = 0.0, 0.0
        for cell, observed in self._observed.items():
            expected = self._expected[cell]
            likeliest, total = expected.argmax(), expected.sum()
            room = total - expected[likeliest]
            if shift and room > 0:
                expected = expected * (1 - min(shift * total, room) / room)
                expected[likeliest] = total - np.delete(expected, likeliest).sum()
            few = expected < 5
            o = [*observed[~few], observed[few].sum()]
            e = [*expected[~few], expected[few].sum()]
            terms = [(x - y) ** 2 / y for x, y in zip(o, e, strict=True) if y >= 1]
            statistic += sum(terms)
            freedom += max(0, len(terms) - 1)
            excess += observed[likeliest] - expected[likeliest]
            variance += expected[likeliest] * (1 - expected[likeliest] / total)
        assert freedom > 0
        any_difference = stats.chi2.sf(statistic, freedom)
        of_the_likeliest = 2 * stats.norm.sf(abs(excess) / math.sqrt(variance)) if variance > 0 else 1.0
        return min(1.0, 2 * float(min(any_difference, of_the_likeliest)))

    def total_variation(self) -> float:
        """Distance between observed and expected distributions, averaged over the cells by their share of the draws."""
        return sum(float(np.abs(self._observed[c] - self._expected[c]).sum()) for c in self._observed) / 2 / self.count
