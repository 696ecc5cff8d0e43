"""A sequence in a batch: the pass it waits for, and what it has said that nobody has taken yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any

from via_sd.runtime.decoding.passes import PassRequest, PassResult

#: What a sequence does: it yields the passes that it needs, is sent their results, and yields what it has to say.
Steps = Generator[Any, PassResult | None, Any]
#: A sequence whose reader has not taken this many messages is not decoded further until he has.
UNREAD = 32


class Member:
    """Runs one sequence from pass to pass.

    Attributes:
        request: the pass it waits for; None while it has to wait for its reader, and at the end.
        messages: what it yielded besides passes, in order.
        ended: whether it has come to its end, `outcome` being what it returned, or failed with `error`.
        waited: passes of others since it asked for its own.
        asked: when it did, on the clock of the batch.
        paused: seconds in which the batch had run no passes until then.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.request: PassRequest | None = None
        self.messages: deque[Any] = deque()
        self.ended = False
        self.outcome: Any = None
        self.error: BaseException | None = None
        self.waited = 0
        self.asked = self.paused = 0.0

    @property
    def held_up(self) -> bool:
        """Whether it waits for its reader."""
        return self.request is None and not self.ended

    def advance(self, result: PassResult | None = None) -> None:
        """Send it the `result` of its pass and go on to the next one, the reader's limit or the end.

        An interrupt of the program (`BaseException`) ends the sequence and is passed on.
        """
        self.request = None
        try:
            while len(self.messages) < UNREAD or result is not None:
                step = self._steps.send(result)
                result = None
                if isinstance(step, PassRequest):
                    self.request, self.waited = step, 0
                    return
                self.messages.append(step)
        except StopIteration as end:
            self.ended, self.outcome = True, end.value
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def fail(self, error: Exception) -> None:
        """Its pass failed with `error`, which is raised where it asked for the pass."""
        self.request = None
        try:
            self._steps.throw(error)
        except BaseException as raised:  # noqa: BLE001 - whatever came of it is what its reader gets
            self._fail(raised)
        else:
            self._steps.close()
            self._fail(error)

    def close(self) -> None:
        """End it where it is: it gives back what it holds."""
        self.request = None
        self.ended = True
        self._steps.close()

    def _fail(self, error: BaseException) -> None:
        self.ended, self.error = True, error
