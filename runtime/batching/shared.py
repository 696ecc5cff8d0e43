"""A batch that several threads read from: whoever waits for his sequence runs the passes of all."""

from __future__ import annotations

import threading
from typing import Any

from via_sd.runtime.batching.batch import Batch
from via_sd.runtime.batching.member import Member


class SharedBatch:
    """Runs a batch on the threads of its readers.

    A reader for whom nothing is there yet runs passes until something is; the others wait and find what came for them.
    So a single reader decodes on its own thread, as if there were no batch, and no thread runs when nobody reads.
    """

    def __init__(self) -> None:
        self.batch = Batch()
        # Reentrant: a stream that is dropped in the middle of something may leave while its thread is in here.
        self._changed = threading.Condition(threading.RLock())
        self._running = False
        self._waiting = 0
        self._joining: list[Member] = []
        self._leaving: list[Member] = []

    def join(self, member: Member) -> None:
        """Let a sequence take part from the next pass on; it has asked for its first."""
        with self._changed:
            self._joining.append(member)

    def leave(self, member: Member) -> None:
        """End a sequence: at once, or behind the pass that is running."""
        with self._changed:
            self._leaving.append(member)
            if not self._running:
                self._let_in_and_out()

    def take(self, member: Member) -> Any:
        """The next message of `member`, running passes until it is there.

        Raises:
            StopIteration: the sequence has come to its end.
            Exception: it failed with this.
        """
        with self._changed:
            while not (member.messages or member.ended) and self._running:
                self._waiting += 1
                try:
                    self._changed.wait()
                finally:
                    self._waiting -= 1
            if member.messages or member.ended:
                return self._taken(member)
            self._running = True
        try:
            while not (member.messages or member.ended):
                with self._changed:
                    self._let_in_and_out()
                if not self.batch.run_pass() and not (member.messages or member.ended):
                    raise RuntimeError("a sequence waits for a pass that nobody runs")
                if self._waiting:
                    with self._changed:
                        self._changed.notify_all()
        finally:
            with self._changed:
                self._running = False
                self._let_in_and_out()
                self.batch.stop()
                self._changed.notify_all()
        return self._taken(member)

    @staticmethod
    def _taken(member: Member) -> Any:
        if member.messages:
            return member.messages.popleft()
        if member.error is not None:
            error, member.error = member.error, None
            raise error
        raise StopIteration

    def _let_in_and_out(self) -> None:
        """Between passes, under the lock: newcomers join, those whose readers have left end."""
        while self._joining:
            self.batch.join(self._joining.pop(0))
        while self._leaving:
            member = self._leaving.pop(0)
            self.batch.leave(member)
            if not member.ended:
                member.close()
