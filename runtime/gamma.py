"""How long a block to draft: the length that buys most tokens for the time it costs, learned per sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepCost:
    """Time of a verifier pass over S tokens in units of a pass over one: 1 + slope * (S - 1).

    Frozen when the pipeline is loaded: block lengths must follow token counts, not the clock, or the same seed would
    not give the same output.
    """

    slope: float

    def __call__(self, tokens: int) -> float:
        return 1.0 + self.slope * (tokens - 1)


class AdaptiveGamma:
    """Chooses block lengths from the acceptance seen so far, kept apart by the drafter's class of situation.

    With a probability a that a drafted token is accepted after those before it were, a block of g costs one pass over
    g + 1 tokens and yields 1 + a + ... + a^g tokens; g = 0 (no draft) is one of the candidates.
    """

    _PRIOR = 2.0  # weight of the prior, in judged tokens
    _MEMORY = 0.9  # what a class remembers of its past, per judged block

    def __init__(self, cost: StepCost, longest: int = 16, fixed: int | None = None) -> None:
        self._cost = cost
        self._longest = longest
        self._fixed = fixed
        self._judged: dict[int, float] = {}
        self._kept: dict[int, float] = {}

    def choose(self, situation: int, limit: int, draft_cost: float = 0.0) -> int:
        """Block length for a `situation` (see `Drafter.expectation`), at most `limit`; 0 means no draft pays."""
        if situation == 0:
            return 0
        if self._fixed is not None:
            return min(self._fixed, limit)
        rate = self._rate(situation)
        best, best_value = 0, 1.0
        expected, survival = 1.0, 1.0
        for g in range(1, min(self._longest, limit) + 1):
            survival *= rate
            expected += survival
            value = expected / (self._cost(g + 1) + g * draft_cost)
            if value > best_value:
                best, best_value = g, value
        return best

    def learn(self, situation: int, judged: int, kept: int) -> None:
        """A block drafted in `situation` had `judged` tokens looked at, of which `kept` were accepted."""
        self._judged[situation] = self._judged.get(situation, 0.0) * self._MEMORY + judged
        self._kept[situation] = self._kept.get(situation, 0.0) * self._MEMORY + kept

    def _rate(self, situation: int) -> float:
        prior = min(0.9, 0.45 + 0.15 * situation)
        judged, kept = self._judged.get(situation, 0.0), self._kept.get(situation, 0.0)
        return (kept + prior * self._PRIOR) / (judged + self._PRIOR)
