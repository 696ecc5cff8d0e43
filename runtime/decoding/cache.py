"""Which tier has seen how much of a sequence, and the pool of KV slots sequences run in.

All tiers of a verifier share one set of buffers, so knowing what lies in them is a matter of counters alone: a tier's
`seen` is the number of positions whose KV it may rely on. A higher tier's KV serves the lower ones; never the reverse.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from via_sd.errors import BusyError
from via_sd.runtime.engines.protocol import Engine, Slot
from via_sd.runtime.engines.rows import Row


class SeenCounters:
    """Per tier, how many positions of the sequence its KV covers.

    `seen` never decreases from a higher tier to a lower one, so that a tier, which feeds from its own `seen` on, can
    never overwrite KV that a higher tier wrote.
    """

    def __init__(self, tiers: Sequence[str]) -> None:
        self._rank = {tier: rank for rank, tier in enumerate(tiers)}
        self._seen = [0] * len(tiers)

    def __getitem__(self, tier: str) -> int:
        return self._seen[self._rank[tier]]

    def wrote(self, tier: str, upto: int) -> None:
        """A pass of `tier` covered every position below `upto`: so it is for that tier and every lower one."""
        for rank in range(self._rank[tier], len(self._seen)):
            self._seen[rank] = upto

    def rollback(self, upto: int) -> None:
        """Forget positions from `upto` on."""
        self._seen = [min(seen, upto) for seen in self._seen]


@dataclass
class KVSlot:
    """A slot of the pool: buffers, and which tokens the full verifier's KV in them belongs to."""

    buffers: Slot
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
        the buffers are thrown away: what a failed step left in them may be no numbers.

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
                slot = KVSlot(self._engine.new_slot())
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


class Tape:
    """One model's KV of one sequence: feeds a tier what it has not seen and keeps the counters true.

    Args:
        buffers: the slot the model's tiers share.
        engine: the model.
        reused: positions the buffers hold already, written by the highest tier.
    """

    def __init__(self, buffers: Slot, engine: Engine, reused: int = 0) -> None:
        self._buffers, self._chunk = buffers, engine.prefill_chunk
        self.seen = SeenCounters(engine.tiers)
        self.seen.wrote(engine.tiers[0], reused)
        self.usage = {tier: Usage() for tier in engine.tiers}

    def run(self, tier: str, sequence: Sequence[int], rows: int) -> Sequence[Row]:
        """Feed `tier` whatever of `sequence` it has not seen.

        Returns:
            What follows each of the last `rows` tokens; the next call makes it void.
        """
        for _ in self.chunks(tier, sequence, rows):
            pass
        return self._feed(tier, sequence, len(sequence), rows)

    def chunks(self, tier: str, sequence: Sequence[int], rows: int) -> Iterator[None]:
        """Feed `tier` one chunk of a long `sequence` for every `next`, up to what `run` can take in one pass."""
        while len(sequence) - self.seen[tier] > self._chunk + rows:
            self._feed(tier, sequence, self.seen[tier] + self._chunk, 1)
            yield

    def settle(self, length: int) -> None:
        """End a round at `length` tokens: the last one was fed to nobody yet, what lies behind it is void."""
        self.seen.rollback(length - 1)

    def _feed(self, tier: str, sequence: Sequence[int], end: int, rows: int) -> Sequence[Row]:
        """A pass over what `tier` has not seen of the first `end` tokens."""
        start, usage = self.seen[tier], self.usage[tier]
        # Until the pass is through, nothing from `start` on can be relied on.
        self.seen.rollback(start)
        begun = perf_counter()
        found = self._buffers.forward(tier, sequence[start:end], start, rows)
        usage.seconds += perf_counter() - begun
        usage.calls += 1
        usage.tokens += end - start
        self.seen.wrote(tier, end)
        return found
