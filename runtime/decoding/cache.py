"""How much of a sequence is cached for each tier, and the pool of KV slots that sequences run in.

All tiers of a verifier share one set of buffers, so counters alone tell what they hold: a tier's cached length is the
number of positions whose KV the tier can use. KV of a higher tier serves the lower ones, never the reverse.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from via_sd.errors import BusyError
from via_sd.runtime.engines.protocol import Engine, KVBuffers
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
class KVSlot:
    """A slot of the pool: KV buffers, and the tokens whose full-verifier KV they hold."""

    buffers: KVBuffers
    tokens: list[int] = field(default_factory=list)
    last_used: int = 0

    def shared_prefix(self, tokens: Sequence[int]) -> int:
        """Length of the longest common beginning of what the slot holds and `tokens`."""
        limit = min(len(self.tokens), len(tokens))
        for index in range(limit):
            if self.tokens[index] != tokens[index]:
                return index
        return limit


class SlotPool:
    """KV slots for concurrent sequences: at most `limit` at once, at most `retained` kept when idle.

    An idle slot remembers its tokens, so a request that begins alike (the next turn of a chat) takes it over and skips
    that much prefill. Only KV of the full verifier counts: below it lies slim-quality KV.
    """

    def __init__(self, engine: Engine, limit: int, retained: int) -> None:
        self._engine = engine
        self._limit = limit
        self._retained = retained
        self._idle: list[KVSlot] = []
        self._in_use = 0
        self._clock = 0
        self._changed = threading.Condition()

    @contextmanager
    def lease(self, tokens: Sequence[int], timeout: float | None) -> Iterator[tuple[KVSlot, int]]:
        """A slot for a prompt, and how many of its tokens are in the slot's buffers already.

        Two are left to feed where there are as many. One is needed, for its logits, and in int4 a pass over one token
        runs another kernel, with other roundings, than the longer ones that fed the prompt when it was new.

        Whoever has the slot sets its `tokens` to those its full-verifier KV covers before it goes back. After a failure
        the buffers are thrown away: a failed step may have left NaN or Inf in them.

        Args:
            timeout: seconds to wait when every slot is taken; None waits for as long as it takes.

        Raises:
            BusyError: no slot came free in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._in_use < self._limit, timeout):
                raise BusyError(
                    f"all {self._limit} KV slots are in use and none came free in {timeout:g} s; "
                    "retry later, or load the pipeline with more max_sequences"
                )
            self._in_use += 1
            slot = self._choose(tokens)
        try:
            if slot is None:
                slot = KVSlot(self._engine.new_buffers())
            reused = min(slot.shared_prefix(tokens), max(0, len(tokens) - 2))
            try:
                yield slot, reused
            except GeneratorExit:  # nobody reads on; between rounds all is well
                self._keep(slot)
                raise
            self._keep(slot)
        finally:
            with self._changed:
                self._in_use -= 1
                self._changed.notify()

    def _keep(self, slot: KVSlot) -> None:
        with self._changed:
            self._clock += 1
            slot.last_used = self._clock
            self._idle.append(slot)
            if len(self._idle) > self._retained:
                self._idle.remove(min(self._idle, key=lambda s: s.last_used))

    def _choose(self, tokens: Sequence[int]) -> KVSlot | None:
        """The idle slot that shares most; else one nobody will miss; None to allocate another."""
        if not self._idle:
            return None
        best = max(self._idle, key=lambda s: (s.shared_prefix(tokens), -s.last_used))
        if best.shared_prefix(tokens) == 0 and len(self._idle) < self._retained:
            return None
        self._idle.remove(best)
        return best


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
        reused: positions the buffers hold already, written by the highest tier.
    """

    def __init__(self, buffers: KVBuffers, engine: Engine, reused: int = 0) -> None:
        self._buffers, self._chunk = buffers, engine.prefill_chunk
        self.lengths = CachedLengths(engine.tiers)
        self.lengths.wrote(engine.tiers[0], reused)
        self.usage = {tier: Usage() for tier in engine.tiers}

    def run(self, tier: str, sequence: Sequence[int], rows: int) -> Sequence[Row]:
        """Feed `tier` the part of `sequence` that is not cached for it.

        Returns:
            What follows each of the last `rows` tokens; the next call makes it void.
        """
        for _ in self.chunks(tier, sequence, rows):
            pass
        return self._feed(tier, sequence, len(sequence), rows)

    def chunks(self, tier: str, sequence: Sequence[int], rows: int) -> Iterator[None]:
        """Feed `tier` one chunk of a long `sequence` for every `next`, up to what `run` can take in one pass."""
        while len(sequence) - self.lengths[tier] > self._chunk + rows:
            self._feed(tier, sequence, self.lengths[tier] + self._chunk, 1)
            yield

    def truncate(self, length: int) -> None:
        """Cut back to a sequence of `length` tokens, of which the last is not fed yet; KV behind it is void."""
        self.lengths.truncate(length - 1)

    def _feed(self, tier: str, sequence: Sequence[int], end: int, rows: int) -> Sequence[Row]:
        """A forward pass of `tier` over those of the first `end` tokens that are not cached for it."""
        start, usage = self.lengths[tier], self.usage[tier]
        # Until the pass is through, nothing from `start` on can be relied on.
        self.lengths.truncate(start)
        begun = perf_counter()
        found = self._buffers.forward(tier, sequence[start:end], start, rows)
        usage.seconds += perf_counter() - begun
        usage.calls += 1
        usage.tokens += end - start
        self.lengths.wrote(tier, end)
        return found
