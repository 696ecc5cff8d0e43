"""The cost model: latency of forward passes in units of a full pass over one token.

All of it is frozen when a pipeline is loaded. Choices follow token counts and these costs, never a clock: else the same
seed would not give the same output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from via_sd.contract.graphs import FULL
from via_sd.runtime.decoding.cache import SequenceCache
from via_sd.runtime.decoding.passes import Beside
from via_sd.runtime.decoding.slim_agreement import OTHERS, AgreementPrior

_LARGEST = 512  # tokens of a pass that costs are asked for, one more


@dataclass(frozen=True)
class StepCost:
    """Latency of a pass over S tokens over that of a full pass over one, interpolated between measured S."""

    measured: Mapping[int, float]

    @property
    def per_token(self) -> float:
        """What one more token costs in a long pass."""
        first, last = min(self.measured), max(self.measured)
        return max(0.0, self.measured[last] - self.measured[first]) / (last - first)

    def shared(self, beside: Beside, longest: int) -> list[float]:
        """What passes cost a sequence that are shared as `beside` says, by the number of its tokens, 0 to `longest`.

        The pass with one token of it is paid by all tokens that are expected to be kept; what further tokens add to it,
        which everybody waits for, by the sequence alone. So it adds tokens where that makes all of them together
        faster.
        """
        first, *costs = self.table[beside.tokens + 1 : beside.tokens + 1 + longest]
        share = first / (1 + beside.kept)
        return [0.0, share, *(share + cost - first for cost in costs)]

    @cached_property
    def table(self) -> list[float]:
        """The cost of every number of tokens that a pass of decoding may have; 0 has none."""
        return [0.0, *(self(tokens) for tokens in range(1, _LARGEST))]

    def __call__(self, tokens: int) -> float:
        sizes = sorted(self.measured)
        if tokens > sizes[-1]:
            return self.measured[sizes[-1]] + self.per_token * (tokens - sizes[-1])
        return float(np.interp(tokens, sizes, [self.measured[s] for s in sizes]))


@dataclass(frozen=True)
class CostModel:
    """What the forward passes of all tiers cost, and what those of slim are expected to bring.

    Attributes:
        full: of a full pass over S tokens.
        slim: of a slim pass over S tokens.
        draft: of one drafted token, in full passes over one; 0 for a drafter that runs no model.
        agreement: how often full is expected to keep a token of slim's.
    """

    full: StepCost
    slim: StepCost
    draft: float = 0.0
    agreement: AgreementPrior = OTHERS


class RoundCost:
    """What one round costs the full verifier; made when the round begins, asked when its passes are through.

    A round pays for the tokens it emits, also for those that the full verifier has still to be fed: that is not the
    later round's cost in which it catches up.
    """

    def __init__(self, cache: SequenceCache, full: StepCost, num_tokens: int) -> None:
        self._cache, self._full = cache, full
        self._fed_before = cache.usage[FULL].tokens
        self._paid_for = num_tokens - 1 - cache.lengths[FULL]

    def of_full(self, emitted: int) -> float:
        """Cost of the full verifier's passes over the `emitted` tokens and the draft, now or later."""
        fed = self._cache.usage[FULL].tokens - self._fed_before
        return self._full(fed - self._paid_for) if fed else self._full.per_token * emitted
