"""Which way a round goes, and whether the slim-verifier earns its passes, from what they have bought so far."""

from __future__ import annotations

from collections.abc import Mapping

from via_sd.runtime.decoding.cost_model import CostModel
from via_sd.runtime.decoding.running_ratio import RunningRatio

#: Ways of a round of `routed`: begin with a slim pass, or go straight to the full verifier.
SLIM_FIRST, FULL_ONLY = "slim", "full"


class RoundPolicy:
    """Chooses between ways to run a round by the tokens per cost that the rounds of each brought.

    Evidence fades with every round of its kind, and more slowly with the others, so that a way not taken drifts back to
    its prior and is tried again.

    Args:
        priors: way -> tokens per cost to begin with; the first is preferred where two are equal.
    """

    _MEMORY, _MEMORY_UNUSED = 0.97, 0.99
    #: An assumption: about four rounds of evidence outweigh the prior.
    _PRIOR_COST = 4.0

    def __init__(self, priors: Mapping[str, float]) -> None:
        self._rates = {way: RunningRatio(self._MEMORY, prior, self._PRIOR_COST) for way, prior in priors.items()}

    def choose(self) -> str:
        """The way with most tokens per cost."""
        return max(self._rates, key=lambda way: self._rates[way].value)

    def learn(self, way: str, tokens: int, cost: float) -> None:
        """A round that went `way` emitted `tokens` for `cost`."""
        for each, rate in self._rates.items():
            if each == way:
                rate.add(tokens, cost)
            else:
                rate.fade(self._MEMORY_UNUSED)


def routed_policy(costs: CostModel) -> RoundPolicy:
    """For `routed`: a slim pass first, or full at once.

    The priors are assumptions that let slim be tried: it writes as many tokens per pass as full does (1.2, little more
    than plain decoding), and full runs as well behind one slim pass in four.
    """
    tokens_per_pass, full_passes = 1.2, 0.25
    return RoundPolicy({SLIM_FIRST: tokens_per_pass / (costs.slim + full_passes), FULL_ONLY: tokens_per_pass})


class CascadeBlock:
    """For `cascade`: how many tokens slim writes before the full verifier tests them; 0 leaves slim out of the round.

    With a the probability that full keeps a token of slim's and t tokens per slim pass, a block of k costs k / t slim
    passes and a full pass over k + 1, and yields 1 + a + … + a^k tokens.
    """

    SIZES = (0, 2, 4, 6, 8, 12, 16, 24)
    _MEMORY = 0.95

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        # Assumptions that let slim be tried: that few of its tokens are rejected, that n-gram drafts nearly double what
        # a slim pass writes, and that two-tier rounds gain a little over plain decoding.
        self._kept = RunningRatio(self._MEMORY, prior=0.85, weight=8.0)
        self._per_pass = RunningRatio(self._MEMORY, prior=1.8, weight=3.0)
        self._two_tier = RunningRatio(self._MEMORY, prior=1.3, weight=3.0)

    def choose(self) -> int:
        """The block size that pays most; 0 where two-tier rounds have paid more so far."""
        kept, per_pass = self._kept.value, self._per_pass.value
        best, best_value = 0, self._two_tier.value
        for size in self.SIZES[1:]:
            yielded = 1 + sum(kept**i for i in range(1, size + 1))
            value = yielded / (size / per_pass * self._costs.slim + self._costs.full(size + 1))
            if value > best_value:
                best, best_value = size, value
        return best

    def slim_pass(self, tokens: int) -> None:
        """A slim pass wrote `tokens`."""
        self._per_pass.add(tokens)

    def judged(self, judged: int, kept: int) -> None:
        """The full verifier looked at `judged` of slim's tokens and kept `kept`."""
        self._kept.add(kept, judged, steps=judged)

    def two_tier(self, emitted: int, cost: float) -> None:
        """A round without slim emitted `emitted` tokens for `cost`; what is known of slim fades meanwhile."""
        self._two_tier.add(emitted, cost)
        self._kept.fade()
