"""The one thread that talks to Triton: it sends responses, asks whether clients are still there, and counts.

Triton's Python backend allows sends from any thread, but a metric touched by two threads at once, or a question about
a request whose last response has gone, ends the whole server. So everything that reaches Triton goes through here.
While the engine computes a step, this thread delivers the one before; text of a request that piles up in the meantime
goes out as one response.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from via_sd.runtime.batching.batch import PassTotals
from via_sd.runtime.triton.scheduler import Job, Outcome, Piece, Reason, RequestFailed

#: Seconds between looks at whether the clients of waiting requests are still there. A running one is asked every step,
#: unless steps are so short that asking would cost more than the steps that may be wasted.
POLL_SECONDS = 0.05
ASK_SECONDS = 0.002


class Channel(Protocol):
    """The way back to one client."""

    stream: bool

    def send(self, piece: Piece) -> None:
        """One response with new text."""
        ...

    def finish(self, piece: Piece, outcome: Outcome) -> None:
        """The last response: the text not sent yet and the outcome."""
        ...

    def fail(self, failure: RequestFailed) -> None:
        """The last response: an error."""
        ...

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled or gone."""
        ...


class Load(NamedTuple):
    """What an instance is doing: requests with a slot and without, and its forward passes so far."""

    active: int = 0
    waiting: int = 0
    passes: PassTotals = PassTotals()


class Meter(Protocol):
    """Counts what the dispatcher sees."""

    def finished(self, job: Job, outcome: Outcome) -> None: ...
    def failed(self, job: Job, failure: RequestFailed) -> None: ...
    def load(self, load: Load) -> None: ...


@dataclass
class _Unsent:
    text: str = ""
    tokens: int = 0

    def take(self) -> Piece:
        piece = Piece(self.text, self.tokens)
        self.text, self.tokens = "", 0
        return piece


class Dispatcher:
    """The sink of a scheduler: takes its events without blocking and delivers them on a thread of its own."""

    def __init__(self, meter: Meter, log: Callable[[str], None]) -> None:
        self._meter = meter
        self._log = log
        self._events: queue.SimpleQueue[Callable[[], Job] | None] = queue.SimpleQueue()
        self._live: dict[Job, _Unsent] = {}
        self._cancel: Callable[[Job], None] = lambda job: None
        self._load: Callable[[], Load] = Load
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)

    def start(self, cancel: Callable[[Job], None], load: Callable[[], Load]) -> None:
        """Begins delivering; `cancel` is told of clients that have gone, `load` gives what the meter shows."""
        self._cancel, self._load = cancel, load
        self._thread.start()

    def close(self) -> None:
        """Delivers what is left and ends the thread."""
        self._events.put(None)
        self._thread.join()

    def opened(self, job: Job) -> None:
        def event() -> Job:
            self._live[job] = _Unsent()
            return job

        self._events.put(event)

    def stepped(self, job: Job, piece: Piece) -> None:
        def event() -> Job:
            unsent = self._live[job]
            unsent.text += piece.text
            unsent.tokens += piece.tokens
            return job

        self._events.put(event)

    def finished(self, job: Job, outcome: Outcome) -> None:
        def event() -> Job:
            unsent = self._live.pop(job)
            self._guarded(job, lambda: job.channel.finish(unsent.take(), outcome))
            self._meter.finished(job, outcome)
            return job

        self._events.put(event)

    def failed(self, job: Job, failure: RequestFailed) -> None:
        def event() -> Job:
            self._flush(job)
            self._live.pop(job)
            self._guarded(job, lambda: job.channel.fail(failure))
            self._meter.failed(job, failure)
            if failure.reason is Reason.INTERNAL:
                self._log(f"a request failed: {failure}")
            return job

        self._events.put(event)

    def _run(self) -> None:
        polled = asked = shown = 0.0
        shown_load: Load | None = None
        while True:
            idle = not self._live and self._load() == shown_load
            events = self._wait(None if idle else POLL_SECONDS)
            # Insertion order, each job once: a set would deliver in an order of its own.
            touched = dict.fromkeys(event() for event in events if event is not None)
            for job in touched:
                self._flush(job)
            if None in events:
                return
            now = time.monotonic()
            if now - polled >= POLL_SECONDS:
                polled = asked = now
                self._poll(self._live)
            elif now - asked >= ASK_SECONDS:
                asked = now
                self._poll(touched)
            load = self._load()
            if load != shown_load and now - shown >= POLL_SECONDS:
                shown, shown_load = now, load
                self._meter.load(load)

    def _wait(self, timeout: float | None) -> list[Callable[[], Job] | None]:
        events = []
        try:
            events.append(self._events.get(timeout=timeout))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            return events

    def _flush(self, job: Job) -> None:
        unsent = self._live.get(job)
        if unsent is not None and job.channel.stream and unsent.text:
            self._guarded(job, lambda: job.channel.send(unsent.take()))

    def _poll(self, jobs: Iterable[Job]) -> None:
        for job in list(jobs):
            # Never asked once its last response has gone: the server does not survive the question.
            if job in self._live and not job.cancelled.is_set():
                self._guarded(job, partial(self._ask, job))

    def _ask(self, job: Job) -> None:
        if job.channel.is_cancelled():
            self._cancel(job)

    def _guarded(self, job: Job, send: Callable[[], None]) -> None:
        try:
            send()
        except Exception as error:  # noqa: BLE001 - whatever it was, the others' responses must go out
            self._log(f"a client could not be reached ({type(error).__name__}: {error}); its request is cancelled")
            self._cancel(job)
