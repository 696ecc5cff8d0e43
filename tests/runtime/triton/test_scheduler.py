"""The scheduler by itself: whose turn it is, who waits, and how requests end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from via_sd.runtime.decoding.statistics import Counters
from via_sd.runtime.triton.scheduler import Job, Limits, Outcome, Piece, Reason, RequestFailed, Scheduler, Steps

PATIENCE = 20.0
STATISTICS = Counters("plain").statistics()


class Record:
    """A sink that writes down what it is told and lets a test wait for the end of a job."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.ends: dict[str, str | Reason] = {}
        self._ended = threading.Condition()

    def opened(self, job: Job) -> None: ...

    def stepped(self, job: Job, piece: Piece) -> None:
        self.steps.append(job.channel)

    def finished(self, job: Job, outcome: Outcome) -> None:
        self._end(job, outcome.finish_reason)

    def failed(self, job: Job, failure: RequestFailed) -> None:
        self._end(job, failure.reason)

    def _end(self, job: Job, how: str | Reason) -> None:
        with self._ended:
            assert job.channel not in self.ends, f"{job.channel} ended twice"
            self.ends[job.channel] = how
            self._ended.notify_all()

    def end_of(self, *names: str) -> list[str | Reason]:
        with self._ended:
            assert self._ended.wait_for(lambda: all(name in self.ends for name in names), PATIENCE)
            return [self.ends[name] for name in names]


class Clock:
    """Seconds that pass in steps alone."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def counted(steps: int, gate: threading.Event | None = None, clock: Clock | None = None, seconds: float = 1.0) -> Steps:
    """A sequence of `steps` steps that each take `seconds`; the first waits for `gate`."""
    for number in range(steps):
        if number == 0 and gate is not None:
            assert gate.wait(PATIENCE)
        if clock is not None:
            clock.now += seconds
        yield Piece("x", 1)
    return Outcome("x" * steps, "stop", 1, STATISTICS)


def test_active_sequences_take_turns(record: Record, clock: Clock) -> None:
    gate = threading.Event()
    scheduler = Scheduler(record, Limits(slots=3), clock=clock)
    for name in "abc":
        scheduler.submit(Job(name, counted(50, gate, clock)))
    gate.set()
    assert record.end_of("a", "b", "c") == ["stop"] * 3
    scheduler.close()
    assert record.steps == list("abc" * 50)


def test_engine_time_is_shared_not_steps(record: Record, clock: Clock) -> None:
    """A sequence of long steps does not crowd out one of short steps."""
    gate = threading.Event()
    scheduler = Scheduler(record, Limits(slots=2), clock=clock)
    scheduler.submit(Job("long", counted(4, gate, clock, seconds=10.0)))
    scheduler.submit(Job("short", counted(30, None, clock)))
    gate.set()
    record.end_of("long", "short")
    scheduler.close()
    turns = "".join("L" if name == "long" else "s" for name in record.steps)
    # Level after ten short steps, and then it is the older one's turn.
    assert turns == "L" + "s" * 10 + "L" + "s" * 10 + "L" + "s" * 10 + "L"


def test_a_newcomer_starts_level_with_who_has_had_least(record: Record, clock: Clock) -> None:
    """It neither waits until its elders are done nor holds them up until it has caught up."""
    scheduler = Scheduler(record, Limits(slots=2), clock=clock)

    def elder() -> Iterator[None]:
        for number in range(20):
            if number == 10:
                scheduler.submit(Job("newcomer", counted(5, None, clock)))
            yield

    def steps() -> Steps:
        for _ in elder():
            clock.now += 1.0
            yield Piece("x", 1)
        return Outcome("x", "stop", 1, STATISTICS)

    scheduler.submit(Job("elder", steps()))
    record.end_of("elder", "newcomer")
    scheduler.close()
    turns = "".join("n" if name == "newcomer" else "e" for name in record.steps)
    assert turns == "e" * 11 + "ne" * 5 + "e" * 4


def test_more_sequences_than_slots_wait_in_order(record: Record) -> None:
    gate = threading.Event()
    scheduler = Scheduler(record, Limits(slots=1))
    for name in "abcd":
        scheduler.submit(Job(name, counted(3, gate)))
    assert scheduler.load[1] >= 3
    gate.set()
    record.end_of(*"abcd")
    scheduler.close()
    assert list(record.ends) == list("abcd")
    assert record.steps == list("aaabbbcccddd")


def test_a_full_queue_turns_a_job_away_at_once(record: Record) -> None:
    gate = threading.Event()
    scheduler = Scheduler(record, Limits(slots=1, queue=2))
    for name in ("runs", "waits", "waits too", "goes"):
        scheduler.submit(Job(name, counted(2, gate)))
    assert record.end_of("goes") == [Reason.QUEUE_FULL]
    gate.set()
    assert record.end_of("runs", "waits", "waits too") == ["stop"] * 3
    scheduler.close()


def test_a_queue_of_none_still_lets_a_job_take_a_free_slot(record: Record) -> None:
    scheduler = Scheduler(record, Limits(slots=1, queue=0))
    scheduler.submit(Job("a", counted(2)))
    assert record.end_of("a") == ["stop"]
    scheduler.close()


def test_a_job_that_waits_too_long_fails_while_another_runs(record: Record) -> None:
    gate = threading.Event()
    scheduler = Scheduler(record, Limits(slots=1, queue_timeout=0.02), workers=2)
    scheduler.submit(Job("runs", counted(2, gate)))
    scheduler.submit(Job("waits", counted(2)))
    assert record.end_of("waits") == [Reason.QUEUE_TIMEOUT]
    gate.set()
    assert record.end_of("runs") == ["stop"]
    scheduler.close()


def test_a_cancelled_job_takes_no_further_step_and_is_closed_before_the_client_hears_of_it(record: Record) -> None:
    closed: list[bool] = []
    at_end: list[bool] = []

    def endless(scheduler: Scheduler, job: Job) -> Steps:
        try:
            yield Piece("x", 1)
            scheduler.cancel(job)
            yield Piece("x", 1)
            raise AssertionError("a step after the cancel")
        finally:
            closed.append(True)

    class Looks(Record):
        def failed(self, job: Job, failure: RequestFailed) -> None:
            at_end.extend(closed)
            super().failed(job, failure)

    record = Looks()
    scheduler = Scheduler(record, Limits(slots=1))
    job = Job("a")
    job.steps = endless(scheduler, job)
    scheduler.submit(job)
    assert record.end_of("a") == [Reason.CANCELLED]
    scheduler.close()
    assert record.steps == ["a", "a"]
    assert at_end == [True]


def test_a_job_cancelled_while_it_waits_never_begins(record: Record) -> None:
    gate = threading.Event()
    scheduler = Scheduler(record, Limits(slots=1), workers=2)
    scheduler.submit(Job("runs", counted(2, gate)))
    waits = Job("waits", counted(2))
    scheduler.submit(waits)
    scheduler.cancel(waits)
    assert record.end_of("waits") == [Reason.CANCELLED]
    gate.set()
    record.end_of("runs")
    scheduler.close()
    assert record.steps == ["runs", "runs"]


def test_a_sequence_that_breaks_leaves_the_others_alone(record: Record) -> None:
    def broken() -> Steps:
        yield Piece("x", 1)
        raise ValueError("a bug")

    scheduler = Scheduler(record, Limits(slots=2))
    scheduler.submit(Job("broken", broken()))
    scheduler.submit(Job("sound", counted(20)))
    assert record.end_of("broken", "sound") == [Reason.INTERNAL, "stop"]
    scheduler.close()


def test_a_job_out_of_time_ends_between_steps(record: Record, clock: Clock) -> None:
    scheduler = Scheduler(record, Limits(slots=1, request_timeout=60.0), clock=clock)
    scheduler.submit(Job("its own", counted(100, None, clock), timeout=2.5))
    assert record.end_of("its own") == [Reason.TIMEOUT]
    assert len(record.steps) == 3
    scheduler.submit(Job("the model's", counted(100, None, clock)))
    assert record.end_of("the model's") == [Reason.TIMEOUT]
    scheduler.close()
    assert len(record.steps) == 3 + 61


def test_closing_fails_what_is_left_and_refuses_what_comes(record: Record) -> None:
    gate = threading.Event()
    scheduler = Scheduler(record, Limits(slots=1))
    scheduler.submit(Job("runs", counted(10**6, gate)))
    scheduler.submit(Job("waits", counted(2)))
    gate.set()
    scheduler.close()
    scheduler.submit(Job("late", counted(2)))
    assert record.end_of("runs", "waits", "late") == [Reason.UNLOADED] * 3


def test_two_workers_run_two_steps_at_once(record: Record) -> None:
    both = threading.Barrier(2)

    def meets() -> Steps:
        both.wait(PATIENCE)
        yield Piece("x", 1)
        return Outcome("x", "stop", 1, STATISTICS)

    scheduler = Scheduler(record, Limits(slots=2), workers=2)
    scheduler.submit(Job("a", meets()))
    scheduler.submit(Job("b", meets()))
    assert record.end_of("a", "b") == ["stop", "stop"]
    scheduler.close()
