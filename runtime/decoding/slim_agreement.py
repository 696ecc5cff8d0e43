"""How often the full verifier keeps a token of the slim-verifier's, by slim's margin there."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from via_sd.masks import Mask
from via_sd.runtime.decoding.running_ratio import RunningRatio

#: Margins (see `Row.margin`) that separate the classes. Where tiers differ, it is at the smallest: with an int8 slim-
#: verifier of SmolLM2-135M the full verifier kept 57 % of the tokens with a margin below 0.05, 69 % of those up to 0.1,
#: 91 % up to 0.2, and all of 1,172 others.
BOUNDS = (0.05, 0.2, 0.6, 2.0)


@dataclass(frozen=True)
class AgreementPrior:
    """What is expected of a slim-verifier before any of its tokens is judged.

    Attributes:
        kept: by class, share of its tokens that full keeps.
        share: by class, share of slim's tokens.
    """

    kept: tuple[float, ...]
    share: tuple[float, ...]


#: As measured on SmolLM2-135M in float32, along the full verifier's texts to 12 prompts: with a slim-verifier in int8,
#: rounded towards 1/2; with three others (int4; int8 and int4 mixed; three layers left out), between the three.
EIGHT_BITS = AgreementPrior((0.6, 0.85, 0.99, 0.998, 0.999), (0.02, 0.06, 0.1, 0.3, 0.52))
OTHERS = AgreementPrior((0.4, 0.6, 0.82, 0.96, 0.995), (0.05, 0.1, 0.15, 0.3, 0.4))


def expected_agreement(slim: Mask | None) -> AgreementPrior:
    """The prior of a slim-verifier: one that does all that full does in 8 bits or more agrees best."""
    nearly_full = slim is not None and {*slim.states, slim.head} <= {"keep", "int8"}
    return EIGHT_BITS if nearly_full else OTHERS


class SlimAgreement:
    """The agreement in one sequence, learned from what full judged."""

    _WEIGHT = 10.0  # of the prior, in tokens
    _MEMORY = 0.98  # per token

    def __init__(self, prior: AgreementPrior = OTHERS) -> None:
        self._kept = [RunningRatio(self._MEMORY, kept, self._WEIGHT) for kept in prior.kept]
        self._share = [RunningRatio(self._MEMORY, share, self._WEIGHT) for share in prior.share]

    def classify(self, margin: float) -> int:
        return bisect_right(BOUNDS, margin)

    def rate(self, margin_class: int) -> float:
        """Probability that full keeps a token of slim's of this class."""
        return self._kept[margin_class].value

    def shares(self) -> list[float]:
        """Share of slim's tokens by class."""
        return [share.value for share in self._share]

    def mean(self) -> float:
        """Probability that full keeps a token of slim's whose margin is not known yet."""
        return sum(share.value * kept.value for share, kept in zip(self._share, self._kept, strict=True))

    def wrote(self, margin_class: int) -> None:
        """Slim wrote a token of this class."""
        for index, share in enumerate(self._share):
            share.add(index == margin_class)

    def judged(self, margin_class: int, kept: bool) -> None:
        """Full judged a token of slim's."""
        self._kept[margin_class].add(kept)
