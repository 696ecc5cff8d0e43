"""One sequence's KV: how much of the sequence is cached for each tier, and the forward passes that extend it.

All tiers of a verifier share one set of buffers, so counters alone tell what they hold: a tier's cached length is the
number of positions whose KV the tier can use. KV of a higher tier serves the lower ones, never the reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from via_sd.contract.graphs import VERIFIER
from via_sd.errors import LogitsError
from via_sd.runtime.decoding.passes import ALONE, Passes, PassRequest
from via_sd.runtime.engines.protocol import Block, Engine, KVBuffers
from via_sd.runtime.engines.rows import Row


class CachedLengths:
    """Per tier, the number of positions whose KV is computed (num_computed_tokens, in the words of vLLM).

    A lower tier's length is never less than a higher tier's. So a tier, which feeds from its own length on, never
    overwrites KV that a higher tier wrote.
    """

    def __init__(self, tiers: Sequence[str]) -> None:
        self._rank = {tier: rank for rank, tier in enumerate(tiers)}
        self._lengths = [0] * len(tiers)

    def __getitem__(self, tier: str) -> int:
        return self._lengths[self._rank[tier]]

    def wrote(self, tier: str, upto: int) -> None:
        """A pass of `tier` covered every position below `upto`: so it is for that tier and every lower one."""
        for rank in range(self._rank[tier], len(self._lengths)):
            self._lengths[rank] = upto

    def truncate(self, upto: int) -> None:
        """Forget positions from `upto` on."""
        self._lengths = [min(length, upto) for length in self._lengths]


@dataclass
class Usage:
    """What one tier of a model was asked for: calls, positions fed, seconds inside the engine."""

    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0


class SequenceCache:
    """One model's KV of one sequence: feeds a tier the tokens that are not cached for it and keeps the lengths.

    Args:
        buffers: KV buffers, shared by all tiers of the model.
        engine: the model.
        model: what the manifest calls it.
        reused: positions the buffers hold already, written by the highest tier.

    Attributes:
        beside: per tier, who shared its last pass.
    """

    def __init__(self, buffers: KVBuffers, engine: Engine, reused: int = 0, model: str = VERIFIER) -> None:
        self.engine, self.model = engine, model
        self._buffers = buffers
        self.lengths = CachedLengths(engine.tiers)
        self.lengths.wrote(engine.tiers[0], reused)
        self.usage = {tier: Usage() for tier in engine.tiers}
        self.beside = dict.fromkeys(engine.tiers, ALONE)

    def forward(self, tier: str, sequence: Sequence[int], rows: int) -> Passes[Sequence[Row]]:
        """Feed `tier` the part of `sequence` that is not cached for it, in one pass or, where it is long, in several.

        Returns:
            What follows each of the last `rows` tokens; the next call makes it void.

        Raises:
            LogitsError: NaN or Inf among them; the buffers are of no use any more.
        """
        usage = self.usage[tier]
        while True:
            start = self.lengths[tier]
            try:
                result = yield PassRequest(self.engine, tier, Block(self._buffers, sequence[start:], start, rows))
            except LogitsError as error:
                place = f"tier {tier} of the {self.model}, positions {start} to {len(sequence) - 1}"
                raise LogitsError(f"{place}: {error}") from None
            assert result is not None
            usage.seconds += result.seconds
            usage.calls += 1
            usage.tokens += result.fed
            self.beside[tier] = result.beside
            self.lengths.wrote(tier, start + result.fed)
            if start + result.fed == len(sequence):
                self._check_finite(tier, result.rows, len(sequence))
                return result.rows

    def _check_finite(self, tier: str, rows: Sequence[Row], end: int) -> None:
        for position, row in enumerate(rows, end - len(rows)):
            if not row.is_finite():
                raise LogitsError(
                    f"tier {tier} of the {self.model} gave logits with NaN or Inf at position {position}; the sequence "
                    "ends here. The weights are damaged, or too large for the precision they run in: export the model "
                    "again from a checkpoint that is sound"
                )

    def truncate(self, length: int) -> None:
        """Cut back to a sequence of `length` tokens, of which the last is not fed yet; KV behind it is void."""
        self.lengths.truncate(length - 1)
