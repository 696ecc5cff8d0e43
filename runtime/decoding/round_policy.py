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
    return RoundPolicy({SLIM_FIRST: tokens_per_pass / (costs.slim(1) + full_passes), FULL_ONLY: tokens_per_pass})
