"""Whether the slim tier earns its passes in this sequence, from what its passes have bought so far.

Everything here follows token counts and frozen costs (see `StepCost`), in passes of the full verifier over one token.
"""

from __future__ import annotations

from via_sd.runtime.decoding.block_length import StepCost


class SlimOrFull:
    """For `routed`: begin a round with a slim pass, or go straight to the full verifier?

    Each way is judged by the tokens per cost its rounds brought. Evidence fades with every round of its kind, and more
    slowly with the others, so that the way not taken drifts back to its prior and is tried again. The priors suppose
    that slim writes as many tokens per pass as full does, and that full is asked again behind a pass in four.
    """

    _MEMORY, _MEMORY_UNUSED = 0.97, 0.99
    _PRIOR_COST = 4.0
    _PRIOR_RATE = 1.2  # tokens per pass
    _PRIOR_ASKED = 0.25

    def __init__(self, slim_cost: float) -> None:
        self._prior = {"slim": self._PRIOR_RATE / (slim_cost + self._PRIOR_ASKED), "full": self._PRIOR_RATE}
        self._tokens = {"slim": 0.0, "full": 0.0}
        self._cost = {"slim": 0.0, "full": 0.0}

    def slim_first(self) -> bool:
        return self._rate("slim") >= self._rate("full")

    def learn(self, way: str, tokens: int, cost: float) -> None:
        """A round that went `way` (slim or full) emitted `tokens` for `cost`."""
        for each in self._tokens:
            memory = self._MEMORY if each == way else self._MEMORY_UNUSED
            self._tokens[each] *= memory
            self._cost[each] *= memory
        self._tokens[way] += tokens
        self._cost[way] += cost

    def _rate(self, way: str) -> float:
        return (self._tokens[way] + self._prior[way] * self._PRIOR_COST) / (self._cost[way] + self._PRIOR_COST)


class CascadeBlock:
    """For `cascade`: how many tokens slim writes before the full verifier tests them; 0 leaves slim out of the round.

    With a the probability that full keeps a token of slim's and t tokens per slim pass, a block of k costs k / t slim
    passes and a full pass over k + 1, and yields 1 + a + … + a^k tokens.
    """

    SIZES = (0, 2, 4, 6, 8, 12, 16, 24)
    _MEMORY = 0.95
    _PRIOR_KEPT, _PRIOR_WEIGHT = 0.85, 8.0
    _PRIOR_PER_PASS, _PRIOR_PASSES = 1.8, 3.0

    def __init__(self, cost: StepCost, slim_cost: float) -> None:
        self._cost, self._slim_cost = cost, slim_cost
        self._judged = self._kept = 0.0
        self._passes = self._written = 0.0
        self._rounds = self._emitted = 0.0

    def choose(self) -> int:
        """The block size that pays most; 0 where two-tier rounds have paid more so far."""
        kept = (self._kept + self._PRIOR_KEPT * self._PRIOR_WEIGHT) / (self._judged + self._PRIOR_WEIGHT)
        per_pass = (self._written + self._PRIOR_PER_PASS * self._PRIOR_PASSES) / (self._passes + self._PRIOR_PASSES)
        best, best_value = 0, self._two_tier()
        for size in self.SIZES[1:]:
            yielded = 1 + sum(kept**i for i in range(1, size + 1))
            value = yielded / (size / per_pass * self._slim_cost + self._cost(size + 1))
            if value > best_value:
                best, best_value = size, value
        return best

    def slim_pass(self, tokens: int) -> None:
        """A slim pass wrote `tokens`."""
        self._passes = self._passes * self._MEMORY + 1
        self._written = self._written * self._MEMORY + tokens

    def judged(self, judged: int, kept: int) -> None:
        """The full verifier looked at `judged` of slim's tokens and kept `kept`."""
        self._judged = self._judged * self._MEMORY**judged + judged
        self._kept = self._kept * self._MEMORY**judged + kept

    def two_tier(self, emitted: int, cost: float) -> None:
        """A round without slim emitted `emitted` tokens for `cost`; what is known of slim fades meanwhile."""
        self._rounds = self._rounds * self._MEMORY + cost
        self._emitted = self._emitted * self._MEMORY + emitted
        self._judged *= self._MEMORY
        self._kept *= self._MEMORY

    def _two_tier(self) -> float:
        return (self._emitted + 1.3 * 3) / (self._rounds + 3)
