"""The batch by itself: who shares which pass, and that nobody waits for long."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from tests.support.table_engine import EngineFailedError, TableEngine, hashed_logits
from via_sd.runtime.batching.batch import MAX_PROMPT_TOKENS, MAX_TOKENS, PATIENCE, Batch
from via_sd.runtime.batching.member import UNREAD, Member
from via_sd.runtime.decoding.cache import SequenceCache
from via_sd.runtime.decoding.passes import ALONE, Beside, PassResult

VOCAB = 8


@pytest.fixture
def engine() -> TableEngine:
    return TableEngine(hashed_logits(VOCAB), VOCAB, 4096, prefill_chunk=128)


def sequence(
    engine: TableEngine, *passes: tuple[str, int], prompt: int = 1
) -> Generator[Any, PassResult | None, list[PassResult]]:
    """A prompt, then `passes` of a tier over so many tokens each, with a message behind each; returns their results."""
    cache = SequenceCache(engine.new_buffers(), engine)
    tokens = [0] * prompt
    results: list[PassResult] = []
    for tier, count in [("full", 0), *passes]:
        tokens += [1] * count
        request = cache.forward(tier, tokens, max(1, count))
        try:
            step = next(request)
            while True:
                result = yield step
                assert result is not None
                results.append(result)
                step = request.send(result)
        except StopIteration:
            pass
        yield f"{tier} {count}"
    return results


def begin(batch: Batch, members: Sequence[Member]) -> None:
    for member in members:
        member.advance()
        batch.join(member)


def run_all(batch: Batch, members: Sequence[Member]) -> None:
    begin(batch, members)
    while batch.run_pass():
        for member in members:
            member.messages.clear()
    assert all(member.ended and member.error is None for member in members)
    assert batch.members == []


def test_sequences_share_every_pass_of_a_tier(engine: TableEngine) -> None:
    members = [Member(sequence(engine, ("full", 1), ("full", 5), ("slim", 2))) for _ in range(4)]
    run_all(batch := Batch(), members)
    assert [(p.tier, len(p.blocks)) for p in engine.passes] == [("full", 4)] * 3 + [("slim", 4)]
    assert batch.totals[:3] == (4, 16, 4 * (1 + 1 + 5 + 2))
    assert [result.beside for result in members[0].outcome] == [Beside(3, 3), Beside(3, 3), Beside(3, 15), Beside(3, 6)]


def test_the_kind_that_most_wait_for_runs_first_so_that_the_others_gather(engine: TableEngine) -> None:
    """Three slim passes for every full one, out of step: full passes are not run for one sequence at a time."""
    members = [
        Member(sequence(engine, *[("slim", 1)] * (n % 4), *[("full", 4), *[("slim", 1)] * 3] * 6)) for n in range(8)
    ]
    run_all(Batch(), members)
    full = [len(p.blocks) for p in engine.passes if p.tier == "full"][1:]
    assert sum(full) == 8 * 6
    assert sum(full) / len(full) > 3


def test_nobody_waits_for_more_passes_than_patience_allows(engine: TableEngine) -> None:
    crowd = [Member(sequence(engine, *[("slim", 1)] * 60)) for _ in range(6)]
    other = Member(sequence(engine, *[("full", 1)] * 12))
    run_all(Batch(), [*crowd, other])
    at = [index for index, p in enumerate(engine.passes) if p.tier == "full"][1:]
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert set(gaps) == {PATIENCE + 1}


def test_a_long_prompt_is_read_in_parts_between_the_passes_of_others(engine: TableEngine) -> None:
    running = [Member(sequence(engine, *[("full", 1)] * 100)) for _ in range(7)]
    batch = Batch()
    begin(batch, running)
    for _ in range(3):
        batch.run_pass()
    newcomer = Member(sequence(engine, ("full", 1), prompt=900))
    begin(batch, [newcomer])
    seen = len(engine.passes)
    while not newcomer.messages:
        batch.run_pass()
        for member in running:
            member.messages.clear()
    parts = [index for index, p in enumerate(engine.passes[seen:]) if p.blocks[0][0] > 1]
    assert all(len(engine.passes[seen + index].blocks) == 1 for index in parts[:-1])
    assert [engine.passes[seen + index].blocks[0][0] for index in parts][:13] == [MAX_PROMPT_TOKENS] * 13
    assert all(b - a <= PATIENCE + 1 for a, b in itertools.pairwise(parts)), "the newcomer starves"
    assert all(b - a >= 2 for a, b in itertools.pairwise(parts)), "two parts in a row hold up the others"


def test_a_prompt_with_nobody_beside_it_is_read_in_the_engine_s_chunks(engine: TableEngine) -> None:
    run_all(Batch(), [Member(sequence(engine, prompt=500))])
    assert [p.blocks[0][0] for p in engine.passes] == [128, 128, 128, 116]


def test_short_prompts_are_read_together_within_the_limit_of_a_pass(engine: TableEngine) -> None:
    run_all(Batch(), [Member(sequence(engine, prompt=40)) for _ in range(7)])
    assert [[count for count, _ in p.blocks] for p in engine.passes] == [[40] * 3, [40] * 3, [40]]
    assert MAX_TOKENS == 128


def test_an_engine_that_takes_one_sequence_gets_one_and_the_sequences_take_turns(engine: TableEngine) -> None:
    engine.max_sequences = 1
    members = [Member(sequence(engine, *[("full", 1)] * 20)) for _ in range(4)]
    run_all(Batch(), members)
    assert all(result.beside == ALONE for member in members for result in member.outcome)
    assert [past for p in engine.passes for _, past in p.blocks] == [past for past in range(21) for _ in members]


def test_who_was_left_out_comes_first_in_the_next_pass(engine: TableEngine) -> None:
    members = [Member(sequence(engine, *[("full", 40)] * 20)) for _ in range(5)]
    run_all(Batch(), members)
    starts = [past for p in engine.passes for count, past in p.blocks if count == 40]
    assert set(Counter(starts).values()) == {5}
    ahead = [max(starts[: index + 1]) - start for index, start in enumerate(starts)]
    assert max(ahead) <= 2 * 40, "one sequence runs ahead of another"


def test_a_failure_ends_the_sequence_that_caused_it_and_no_other(engine: TableEngine) -> None:
    members = [Member(sequence(engine, *[("full", 2)] * 10)) for _ in range(5)]
    begin(batch := Batch(), members)
    doomed = engine.buffers[2]
    engine.fails = lambda buffers: buffers is doomed and len(doomed.calls) >= 4
    while batch.run_pass():
        pass
    assert isinstance(members[2].error, EngineFailedError)
    whole = [member for member in members if member is not members[2]]
    assert all(member.error is None and len(member.outcome) == 11 for member in whole)
    assert {tuple(kv.held) for kv in engine.buffers if kv is not doomed} == {(0, *[1] * 20)}


def test_a_sequence_whose_reader_is_away_waits_for_him_and_holds_up_nobody(engine: TableEngine) -> None:
    away, here = (Member(sequence(engine, *[("full", 1)] * 100)) for _ in range(2))
    begin(batch := Batch(), [away, here])
    while not here.ended:
        assert batch.run_pass()
        here.messages.clear()
    assert len(away.messages) == UNREAD
    assert away.held_up
    assert not batch.run_pass()
    away.messages.clear()
    while batch.run_pass():
        away.messages.clear()
    assert len(away.outcome) == 101


def test_an_interrupt_of_the_program_leaves_the_other_sequences_as_they_were(engine: TableEngine) -> None:
    def interrupted() -> Generator[Any, PassResult | None, None]:
        yield next(sequence(engine))
        raise KeyboardInterrupt

    first, broken, last = Member(sequence(engine, ("full", 1))), Member(interrupted()), Member(sequence(engine))
    begin(batch := Batch(), [first, broken, last])
    with pytest.raises(KeyboardInterrupt):
        batch.run_pass()
    assert isinstance(broken.error, KeyboardInterrupt)
    while batch.run_pass():
        pass
    assert first.error is None
    assert last.error is None
    assert (len(first.outcome), len(last.outcome)) == (2, 1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_time_is_the_engine_s_the_others_or_nobody_s(engine: TableEngine) -> None:
    clock = Clock()
    forward = engine.forward

    def takes_time(tier: str, blocks: Any) -> Any:
        clock.now += 1.0 if tier == "full" else 0.25
        return forward(tier, blocks)

    engine.forward = takes_time  # type: ignore[method-assign]
    batch = Batch(clock)
    begin(batch, [full := Member(sequence(engine, ("full", 1)))])
    batch.run_pass()
    batch.stop()
    clock.now += 60
    late = [Member(sequence(engine, ("slim", 1), ("slim", 1))) for _ in range(2)]
    begin(batch, late)
    clock.now += 60
    while batch.run_pass():
        pass
    first, second = full.outcome
    assert (first.seconds, first.waited, first.paused) == (1.0, 0.0, 0.0)
    assert (second.seconds, second.waited, second.paused) == (1.0, 0.0, 120.0)
    begun, *rest = late[0].outcome
    assert (begun.waited, begun.paused) == (0.0, 60.0)
    assert [result.seconds for result in rest] == [0.25, 0.25]
    assert batch.totals.seconds == pytest.approx(1.0 + 1.0 + 0.25 + 0.25)
