"""The scheduler by itself: whose turn it is, who waits, and how requests end."""

from __future__ import annotations

import threading

import pytest

from via_sd.export.triton.serving.scheduler import Job, Limits, Outcome, Piece, Reason, RequestFailed, Scheduler, Steps

PATIENCE = 20.0


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


@pytest.fixture
def record() -> Record:
    return Record()


def counted(steps: int, gate: threading.Event | None = None) -> Steps:
    """A sequence of `steps` steps; the first waits for `gate`."""
    for number in range(steps):
        if number == 0 and gate is not None:
            assert gate.wait(PATIENCE)
        yield Piece("x", 1)
    return Outcome("x" * steps, "stop", 1, {})


def test_active_sequences_take_turns(record: Record) -> None:
    gate = threading.Event()
    scheduler = Scheduler(record, Limits(slots=3))
    scheduler.submit(Job("a", counted(50, gate)))
    scheduler.submit(Job("b", counted(50)))
    scheduler.submit(Job("c", counted(50)))
    gate.set()
    assert record.end_of("a", "b", "c") == ["stop"] * 3
    scheduler.close()
    # The first one to end has seen the others well on their way, and none has waited for another to end.
    first_end = min(len(record.steps) - record.steps[::-1].index(name) for name in "abc")
    assert min(record.steps[:first_end].count(name) for name in "abc") >= 10


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


def test_a_job_out_of_time_ends_between_steps(record: Record) -> None:
    def slow() -> Steps:
        while True:
            yield Piece("x", 1)

    scheduler = Scheduler(record, Limits(slots=1, request_timeout=60.0))
    scheduler.submit(Job("a", slow(), timeout=0.02))
    assert record.end_of("a") == [Reason.TIMEOUT]
    scheduler.close()
    assert record.steps


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
        return Outcome("x", "stop", 1, {})

    scheduler = Scheduler(record, Limits(slots=2), workers=2)
    scheduler.submit(Job("a", meets()))
    scheduler.submit(Job("b", meets()))
    assert record.end_of("a", "b") == ["stop", "stop"]
    scheduler.close()


def test_engine_time_is_shared_not_steps(record: Record) -> None:
    """A sequence of long steps does not crowd out one of short steps."""

    def busy(work: int, steps: int) -> Steps:
        for _ in range(steps):
            sum(range(work))
            yield Piece("x", 1)
        return Outcome("", "stop", 1, {})

    gate = threading.Event()

    def gated() -> Steps:
        assert gate.wait(PATIENCE)
        return (yield from busy(200_000, 30))

    scheduler = Scheduler(record, Limits(slots=2))
    scheduler.submit(Job("long", gated()))
    scheduler.submit(Job("short", busy(2_000, 30)))
    gate.set()
    record.end_of("long", "short")
    scheduler.close()
    # All thirty short steps fit beside the first few long ones.
    assert record.steps[: record.steps.index("short") + 40].count("short") == 30
