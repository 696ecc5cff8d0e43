"""From requests to running sequences: queue, slots, turns, time-outs, cancellation.

A sequence is a generator that goes on to the next thing it has to say per `next`. The active sequences take turns on
one thread: whoever has something to say is heard first, and where nobody has, the one whose turn is longest ago goes
on, which runs forward passes that all of them share (`via_sd.runtime.batching`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Protocol

from via_sd.runtime.decoding.statistics import Statistics


class Reason(Enum):
    """Why a request ended without an answer."""

    INVALID = "invalid"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    UNLOADED = "unloaded"
    INTERNAL = "internal"


class RequestFailed(Exception):  # noqa: N818 - it says what became of the request
    """A request ended without an answer; raised by a sequence, or passed to the sink by the scheduler."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Piece:
    """What one step added: text that is certain, maybe none, and the tokens behind it."""

    text: str
    tokens: int


@dataclass(frozen=True)
class Outcome:
    """A finished sequence: the whole text, why it ended, the runtime's statistics, log-probabilities if asked for."""

    text: str
    finish_reason: str
    prompt_tokens: int
    stats: Statistics
    log_probs: list[float] | None = None


#: Yields after every engine step and returns the outcome; closing it frees its KV slot.
Steps = Generator[Piece, None, Outcome]


@dataclass(eq=False)
class Job:
    """A request on its way through the scheduler; times are seconds, points in time those of its clock.

    Attributes:
        channel: where the sink sends what becomes of it.
        steps: the sequence, not begun: it takes its KV slot with the first step. None for a request that is refused.
        cancelled: set when nobody wants the answer any more; the sequence may look at it between steps.
        timeout: longest time from submission to the end.
        ready: whether the next step is there without a forward pass.
        turn: number of its last step among those of all jobs; 0 before the first.
        first_token: when its first token was there.
    """

    channel: Any
    steps: Steps | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    timeout: float | None = None
    number: int = 0
    submitted: float = 0.0
    started: float | None = None
    first_token: float | None = None
    ready: Callable[[], bool] = lambda: False
    turn: int = 0

    def out_of_time(self, now: float) -> bool:
        """Whether the request has used up the time it was given as a whole."""
        return self.timeout is not None and now - self.submitted > self.timeout


class Sink(Protocol):
    """Takes what happens to jobs, in order for each job; called from the scheduler's threads, so it must not block."""

    def opened(self, job: Job) -> None: ...
    def stepped(self, job: Job, piece: Piece) -> None: ...
    def finished(self, job: Job, outcome: Outcome) -> None: ...
    def failed(self, job: Job, failure: RequestFailed) -> None: ...


@dataclass(frozen=True)
class Limits:
    """How many sequences run, how many may wait, and for how many seconds (None: as long as it takes)."""

    slots: int = 4
    queue: int = 128
    queue_timeout: float | None = None
    request_timeout: float | None = None


class Scheduler:
    """Runs jobs to their end on a thread of its own; every job ends with exactly one `finished` or `failed`.

    `clock` tells the time in seconds, for time-outs.
    """

    def __init__(self, sink: Sink, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink = sink
        self._limits = limits
        self._clock = clock
        self._waiting: deque[Job] = deque()
        self._active: list[Job] = []
        self._changed = threading.Condition()
        self._numbers = self._turns = 0
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="steps", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Takes a job, or fails it at once if the queue is full."""
        with self._changed:
            self._numbers += 1
            job.number, job.submitted = self._numbers, self._clock()
            if job.timeout is None:
                job.timeout = self._limits.request_timeout
            self._sink.opened(job)
            free = self._limits.slots - len(self._active)
            if self._closed:
                self._sink.failed(job, RequestFailed(Reason.UNLOADED, "the model is being unloaded"))
            elif len(self._waiting) >= self._limits.queue + max(free, 0):
                failure = f"{len(self._waiting)} requests are waiting, which is the queue's limit: try again later"
                self._sink.failed(job, RequestFailed(Reason.QUEUE_FULL, failure))
            else:
                self._waiting.append(job)
                self._changed.notify()

    def refuse(self, job: Job, failure: RequestFailed) -> None:
        """Fails a job at once, before any that wait."""
        with self._changed:
            job.submitted = self._clock()
            self._sink.opened(job)
            self._sink.failed(job, failure)

    def cancel(self, job: Job) -> None:
        """Ends a job before its next step, wherever it is; no effect once it has ended."""
        with self._changed:
            job.cancelled.set()
            self._changed.notify()

    def close(self) -> None:
        """Fails whatever is left and ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def load(self) -> tuple[int, int]:
        """How many jobs run and how many wait."""
        with self._changed:
            return len(self._active), len(self._waiting)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            deliver = self._step(job)
            if deliver is not None:
                with self._changed:
                    self._active.remove(job)
                # Only now does the client hear of it: a request it sends in answer finds the slot free.
                deliver()

    def _next(self) -> Job | None:
        """The job whose turn it is, waiting for one if need be; None when it is time to go."""
        with self._changed:
            while True:
                now = self._clock()
                self._sift(now)
                while self._waiting and len(self._active) < self._limits.slots:
                    job = self._waiting.popleft()
                    job.started = now
                    self._active.append(job)
                if self._active:
                    job = min(self._active, key=lambda each: (not each.ready(), each.turn, each.number))
                    self._turns += 1
                    job.turn = self._turns
                    return job
                if self._closed:
                    return None
                self._changed.wait(self._until_next_timeout(now))

    def _sift(self, now: float) -> None:
        """Takes out of the queue what should not wait any longer."""
        kept: deque[Job] = deque()
        for job in self._waiting:
            waited = now - job.submitted
            if job.cancelled.is_set():
                failure = RequestFailed(Reason.CANCELLED, "the client cancelled the request while it was waiting")
            elif self._closed:
                failure = RequestFailed(Reason.UNLOADED, "the model is being unloaded")
            elif job.out_of_time(now):
                failure = RequestFailed(
                    Reason.TIMEOUT,
                    f"the request was not done within {job.timeout:g} s, its time-out: it was still waiting for a slot",
                )
            elif waited > (self._limits.queue_timeout or float("inf")):
                failure = RequestFailed(
                    Reason.QUEUE_TIMEOUT, f"no slot came free within {waited:.1f} s, the longest it may wait: try later"
                )
            else:
                kept.append(job)
                continue
            self._sink.failed(job, failure)
        self._waiting = kept

    def _until_next_timeout(self, now: float) -> float | None:
        limits = [
            job.submitted + limit - now
            for job in self._waiting
            for limit in (self._limits.queue_timeout, job.timeout)
            if limit is not None
        ]
        return max(min(limits), 0.001) if limits else None

    def _step(self, job: Job) -> Callable[[], None] | None:
        """One engine step of `job`; what to tell the sink if the job ended with it."""
        begun = self._clock()
        assert job.steps is not None
        try:
            if job.cancelled.is_set():
                raise RequestFailed(Reason.CANCELLED, "the client cancelled the request")
            if self._closed:
                raise RequestFailed(Reason.UNLOADED, "the model is being unloaded")
            if job.out_of_time(begun):
                raise RequestFailed(Reason.TIMEOUT, f"the request was not done within {job.timeout:g} s, its time-out")
            piece = next(job.steps)
        except StopIteration as end:
            return partial(self._sink.finished, job, end.value)
        except RequestFailed as failure:
            job.steps.close()
            return partial(self._sink.failed, job, failure)
        except Exception as error:  # noqa: BLE001 - one broken request must not stop the others
            broken = RequestFailed(Reason.INTERNAL, f"{type(error).__name__}: {error}")
            return partial(self._sink.failed, job, broken)
        now = self._clock()
        if piece.tokens and job.first_token is None:
            job.first_token = now
        self._sink.stepped(job, piece)
        return None
