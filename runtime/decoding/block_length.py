"""How long a block to draft: the length that buys most tokens for the time it costs, learned per sequence."""

from __future__ import annotations

from via_sd.runtime.decoding.cost_model import StepCost
from via_sd.runtime.decoding.passes import ALONE, Beside
from via_sd.runtime.decoding.running_ratio import RunningRatio


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

    #: Acceptance to begin with, by class: rounded from n-gram drafts of small instruction-tuned models on mixed text.
    _PRIOR = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
    _PRIOR_WEIGHT = 6.0  # in judged tokens
    _MEMORY = 0.95  # per judged token of the class

    def __init__(self, cost: StepCost, longest: int = 15, fixed: int | None = None) -> None:
        self._cost, self._longest = cost, longest
        self.fixed = fixed
        self._acceptance = [RunningRatio(self._MEMORY, prior, self._PRIOR_WEIGHT) for prior in self._PRIOR]

    def choose(self, situation: int, limit: int, draft_cost: float = 0.0, beside: Beside = ALONE) -> int:
        """Block length for a `situation` (see `Drafter.expectation`), at most `limit`; 0 means no draft pays.

        In a pass that is shared, the tokens that it yields to all of them count against what it costs all of them.
        """
        if situation == 0:
            return 0
        if self.fixed is not None:
            return min(self.fixed, limit)
        costs, others = self._cost.table, beside.tokens
        expected, survival = 1 + beside.kept, 1.0
        best, best_value = 0, expected / costs[others + 1]
        for g in range(1, min(self._longest, limit) + 1):
            survival *= self.acceptance(situation + g - 1)
            expected += survival
            value = expected / (costs[others + 1 + g] + g * draft_cost)
            if value > best_value:
                best, best_value = g, value
        return best

    def learn(self, situation: int, judged: int, kept: int) -> None:
        """A block drafted in `situation` had `judged` tokens looked at, of which the first `kept` were accepted."""
        for j in range(judged):
            self._of(situation + j).add(j < kept)

    def acceptance(self, situation: int) -> float:
        """Probability that a token drafted in `situation` is accepted."""
        return self._of(situation).value

    def _of(self, situation: int) -> RunningRatio:
        return self._acceptance[min(situation, len(self._acceptance) - 1)]
