"""How long a block to draft: the length that buys most tokens for the time it costs, learned per sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StepCost:
    """Time of a verifier pass over S tokens in units of a pass over one, interpolated between measured S.

    Frozen when the pipeline is loaded: block lengths must follow token counts, not the clock, or the same seed would
    not give the same output.
    """

    measured: Mapping[int, float]

    @property
    def per_token(self) -> float:
        """What one more token costs in a long pass."""
        first, last = min(self.measured), max(self.measured)
        return max(0.0, self.measured[last] - self.measured[first]) / (last - first)

    def __call__(self, tokens: int) -> float:
        sizes = sorted(self.measured)
        if tokens > sizes[-1]:
            return self.measured[sizes[-1]] + self.per_token * (tokens - sizes[-1])
        return float(np.interp(tokens, sizes, [self.measured[s] for s in sizes]))


class AdaptiveGamma:
    """Chooses block lengths from the acceptance so far in this sequence.

    A drafter says in which class of situation it drafts (the n-gram drafter: the length of the match it continues). A
    drafted token that was accepted lengthens the match, so the j-th token of a block in class c is accepted as tokens
    of class c + j are. With those probabilities a_1, a_2, … a block of g costs one pass over g + 1 tokens and yields
    1 + a_1 + a_1 a_2 + … tokens; g = 0 (no draft) is one of the candidates, which is what backs off when nothing hits.

    Args:
        cost: of a verifier pass.
        longest: longest block considered.
        fixed: block length to use instead.
    """

    #: Acceptance to begin with, by class; from n-gram drafts of small instruction-tuned models on mixed text.
    _PRIOR = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
    _PRIOR_WEIGHT = 6.0  # in judged tokens
    _MEMORY = 0.95  # what a class remembers of its past, per judged token

    def __init__(self, cost: StepCost, longest: int = 15, fixed: int | None = None) -> None:
        self._costs = [cost(tokens) for tokens in range(1, longest + 2)]
        self._fixed = fixed
        self._judged = [0.0] * len(self._PRIOR)
        self._kept = [0.0] * len(self._PRIOR)

    def choose(self, situation: int, limit: int, draft_cost: float = 0.0) -> int:
        """Block length for a `situation` (see `Drafter.expectation`), at most `limit`; 0 means no draft pays."""
        if situation == 0:
            return 0
        if self._fixed is not None:
            return min(self._fixed, limit)
        best, best_value = 0, 1.0
        expected, survival = 1.0, 1.0
        for g in range(1, min(len(self._costs) - 1, limit) + 1):
            survival *= self._rate(situation + g - 1)
            expected += survival
            value = expected / (self._costs[g] + g * draft_cost)
            if value > best_value:
                best, best_value = g, value
        return best

    def learn(self, situation: int, judged: int, kept: int) -> None:
        """A block drafted in `situation` had `judged` tokens looked at, of which the first `kept` were accepted."""
        for j in range(judged):
            at = self._class(situation + j)
            self._judged[at] = self._judged[at] * self._MEMORY + 1
            self._kept[at] = self._kept[at] * self._MEMORY + (j < kept)

    def _rate(self, situation: int) -> float:
        at = self._class(situation)
        prior = self._PRIOR[at] * self._PRIOR_WEIGHT
        return (self._kept[at] + prior) / (self._judged[at] + self._PRIOR_WEIGHT)

    def _class(self, situation: int) -> int:
        return min(situation, len(self._PRIOR) - 1)
