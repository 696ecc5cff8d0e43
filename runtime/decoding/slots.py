"""The pool of KV slots that concurrent sequences run in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from via_sd.errors import BusyError
from via_sd.runtime.engines.protocol import Engine, KVBuffers

#: Fewer tokens are fed again rather than copied.
_LEAST_COPIED = 8


@dataclass
class KVSlot:
    """A slot of the pool: KV buffers, and the tokens whose full-verifier KV they hold.

    Attributes:
        tokens: while a sequence runs in the slot, its prompt.
        computed: while a sequence runs in the slot, tells how many tokens of the prompt it has read.
    """

    buffers: KVBuffers
    tokens: list[int] = field(default_factory=list)
    last_used: int = 0
    computed: Callable[[], int] | None = None

    def shared_prefix(self, tokens: Sequence[int]) -> int:
        """Length of the longest common beginning of what the slot holds and `tokens`."""
        limit = min(len(self.tokens), len(tokens))
        if self.computed is not None:
            limit = min(limit, self.computed())
        for index in range(limit):
            if self.tokens[index] != tokens[index]:
                return index
        return limit


class SlotPool:
    """KV slots for concurrent sequences: at most `limit` at once, at most `retained` kept when idle.

    An idle slot remembers its tokens, so a request that begins alike (the next turn of a chat) takes it over and skips
    that much prefill. What a sequence that is running has read of its prompt is copied for one that begins like it.
    Only KV of the full verifier counts: below it lies slim-quality KV.
    """

    def __init__(self, engine: Engine, limit: int, retained: int) -> None:
        self._engine = engine
        self._limit = limit
        self._retained = retained
        self._idle: list[KVSlot] = []
        self._running: list[KVSlot] = []
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
            reused = self._begin(slot, tokens)
            try:
                yield slot, reused
            except GeneratorExit:  # nobody reads on; between rounds all is well
                self._keep(slot)
                raise
            except BaseException:
                with self._changed:
                    self._running.remove(slot)
                    self._engine.release(slot.buffers)
                raise
            self._keep(slot)
        finally:
            with self._changed:
                self._in_use -= 1
                self._changed.notify()

    def _begin(self, slot: KVSlot, tokens: Sequence[int]) -> int:
        """Let a sequence with the prompt `tokens` begin in `slot`; how many of them are in its buffers."""
        most = max(0, len(tokens) - 2)
        with self._changed:
            reused = min(slot.shared_prefix(tokens), most)
            best = max(self._running, key=lambda s: s.shared_prefix(tokens), default=slot)
            found = min(best.shared_prefix(tokens), most)
            # Under the lock: until the copy is made, nobody else gets the buffers that it is made of.
            if found >= reused + _LEAST_COPIED and self._engine.copy(best.buffers, slot.buffers, found):
                reused = found
            slot.tokens, slot.computed = list(tokens), lambda: reused
            self._running.append(slot)
        return reused

    def _keep(self, slot: KVSlot) -> None:
        with self._changed:
            self._running.remove(slot)
            self._clock += 1
            slot.last_used = self._clock
            self._idle.append(slot)
            if len(self._idle) > self._retained:
                dropped = min(self._idle, key=lambda s: s.last_used)
                self._idle.remove(dropped)
                self._engine.release(dropped.buffers)

    def _choose(self, tokens: Sequence[int]) -> KVSlot | None:
        """The idle slot that shares most; else one nobody will miss; None to allocate another."""
        if not self._idle:
            return None
        best = max(self._idle, key=lambda s: (s.shared_prefix(tokens), -s.last_used))
        if best.shared_prefix(tokens) == 0 and len(self._idle) < self._retained:
            return None
        self._idle.remove(best)
        return best
