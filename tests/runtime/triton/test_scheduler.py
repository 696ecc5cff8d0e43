"""The scheduler by itself: whose turn it is, who waits, and how requests end."""

from __future__ import annotations

import threading

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


def until(gate: threading.Event) -> Steps:
    """A sequence of short steps that ends when `gate` opens."""
    while not gate.wait(0.001):
        yield Piece("x", 1)
    return Outcome("x", "stop", 1, STATISTICS)


def test_active_sequences_take_turns(record: Record, clock: Clock) -> None:
    gate = threading.Event()
    scheduler = Scheduler(record, Limits(slots=3), clock=clock)
    for name in "abc":
        scheduler.submit(Job(name, counted(50, gate, clock)))
    gate.set()
    assert record.end_of("a", "b", "c") == ["stop"] * 3
    scheduler.close()
    assert record.steps == list("abc" * 50)


def test_who_has_something_to_say_is_heard_before_anybody_goes_on(record: Record) -> None:
    """What a shared pass brought to all is delivered before the next one runs."""
    passes = 0
    there = dict.fromkeys("abc", 1)  # messages of the pass that began them

    def steps(name: str) -> Steps:
        nonlocal passes
        for _ in range(10):
            if not there[name]:
                passes += 1
                for each in there:
                    there[each] += 1
            there[name] -= 1
            yield Piece("x", 1)
        return Outcome("x", "stop", 1, STATISTICS)

    scheduler = Scheduler(record, Limits(slots=3))
    for name in "abc":
        scheduler.submit(Job(name, steps(name), ready=lambda name=name: there[name] > 0))  # type: ignore[misc]
    assert record.end_of("a", "b", "c") == ["stop"] * 3
    scheduler.close()
    assert passes == 9
    assert all(sorted(record.steps[at : at + 3]) == list("abc") for at in range(0, 30, 3))


def test_a_newcomer_takes_the_next_turn(record: Record) -> None:
    scheduler = Scheduler(record, Limits(slots=2))

    def steps() -> Steps:
        for number in range(20):
            if number == 10:
                scheduler.submit(Job("newcomer", counted(5)))
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
    scheduler = Scheduler(record, Limits(slots=1, queue_timeout=0.02))
    scheduler.submit(Job("runs", until(gate)))
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
    scheduler = Scheduler(record, Limits(slots=1))
    scheduler.submit(Job("runs", until(gate)))
    waits = Job("waits", counted(2))
    scheduler.submit(waits)
    scheduler.cancel(waits)
    assert record.end_of("waits") == [Reason.CANCELLED]
    gate.set()
    record.end_of("runs")
    scheduler.close()
    assert "waits" not in record.steps


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
