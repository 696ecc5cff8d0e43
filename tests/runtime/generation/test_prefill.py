"""A long prompt is read in chunks, between which whoever drives the stream has the word."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from tests.support.pipelines import WatchedPipeline, table_pipeline
from tests.support.table_engine import TableEngine, hashed_logits

VOCAB, CHUNK = 8, 16
PROMPT = "abcdefgh" * 8


@pytest.fixture
def engine() -> TableEngine:
    return TableEngine(hashed_logits(VOCAB), VOCAB, prefill_chunk=CHUNK)


@pytest.fixture
def pipeline(engine: TableEngine, tmp_path: Path) -> WatchedPipeline:
    return table_pipeline(engine, tmp_path)


@pytest.mark.parametrize("mode", ["plain", "speculative", "cascade", "routed"])
def test_every_chunk_but_the_last_yields_without_a_token(
    mode: str, pipeline: WatchedPipeline, engine: TableEngine
) -> None:
    options: dict[str, Any] = {"mode": mode, "raw": True, "max_new_tokens": 5, "ignore_eos": True}
    chunks = list(stream := pipeline.stream(PROMPT, **options))
    assert [chunk.token_ids for chunk in chunks[:3]] == [[], [], []]
    assert all(chunk.token_ids for chunk in chunks[3:])
    assert [len(call.tokens) for call in engine.buffers[0].calls[:4]] == [CHUNK] * 4
    assert stream.completion.stats.rounds == len(chunks) - 3
    assert "".join(chunk.text for chunk in chunks) == stream.completion.text
    assert stream.completion.stats.time_ms.prefill > 0


@pytest.mark.parametrize("mode", ["speculative", "cascade", "routed"])
def test_a_model_drafter_reads_in_chunks_too_behind_the_first_token(
    mode: str, engine: TableEngine, tmp_path: Path
) -> None:
    logits = hashed_logits(VOCAB)
    drafter = TableEngine(lambda tier, *at: logits("slim", *at), VOCAB, tiers=("full",), prefill_chunk=2 * CHUNK)
    pipeline = table_pipeline(engine, tmp_path, draft_with=drafter)
    chunks = list(pipeline.stream(PROMPT, mode=mode, raw=True, max_new_tokens=9, ignore_eos=True, gamma=2))
    assert [len(chunk.token_ids) for chunk in chunks[:5]] == [0, 0, 0, 1, 0]
    assert all(chunk.token_ids for chunk in chunks[5:])
    assert [len(call.tokens) for call in drafter.buffers[0].calls[:2]] == [2 * CHUNK, 2 * CHUNK + 1]
    plain = pipeline.generate(PROMPT, mode="plain", raw=True, max_new_tokens=9, ignore_eos=True)
    if mode != "routed":
        assert [token for chunk in chunks for token in chunk.token_ids] == plain.token_ids


def test_a_cancelled_prompt_ends_behind_its_chunk_and_what_was_read_is_kept(
    pipeline: WatchedPipeline, engine: TableEngine
) -> None:
    cancel = threading.Event()
    stream = pipeline.stream(PROMPT, raw=True, cancel=cancel, logprobs=0)
    next(stream)
    cancel.set()
    assert [chunk.finish_reason for chunk in stream] == ["cancelled"]
    found = stream.completion
    assert (found.token_ids, found.text, found.finish_reason, found.logprobs) == ([], "", "cancelled", [])
    assert len(engine.buffers[0].calls) == 2
    assert (found.stats.emitted_tokens, found.stats.tokens_per_s) == (0, None)
    again = pipeline.generate(PROMPT, raw=True, max_new_tokens=3)
    assert again.stats.reused_prefix_tokens == 2 * CHUNK


class Clock:
    """The runtime's clock, which can be moved on: `away` seconds ahead of the real one."""

    away = 0.0

    def __call__(self) -> float:
        return perf_counter() + self.away


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    modules = [module for name, module in sys.modules.items() if name.startswith("via_sd.runtime.")]
    readers = [module for module in modules if getattr(module, "perf_counter", None) is perf_counter]
    assert len(readers) >= 3
    for module in readers:
        monkeypatch.setattr(module, "perf_counter", clock)
    return clock


@pytest.mark.parametrize("kind", ["long", "short"])
def test_the_reader_s_time_is_not_the_stream_s(kind: str, pipeline: WatchedPipeline, clock: Clock) -> None:
    """Neither while the prompt is read nor while text is written."""
    stream = pipeline.stream(PROMPT if kind == "long" else "abc", mode="plain", raw=True, max_new_tokens=6)
    for _ in stream:
        clock.away += 60  # a minute for each chunk, far more than the whole stream takes
    stats = stream.completion.stats
    away = 1e3 * clock.away
    assert away >= 5 * 60e3
    assert stats.time_ms.total < away / 2
    assert stats.time_ms.host < away / 2
    assert stats.ttft_ms < away / 2
    assert stats.tokens_per_s > 1e3 * 5 / (away / 2)


def test_a_dropped_stream_gives_its_slot_back_at_once(engine: TableEngine, tmp_path: Path) -> None:
    """Not when the garbage collector comes by: a request may be waiting for the slot."""
    pipeline = table_pipeline(engine, tmp_path, max_sequences=1, slot_timeout=0.001)
    gc.disable()
    try:
        for _ in range(3):
            stream = pipeline.stream("abc", raw=True, max_new_tokens=9)
            next(stream)
            del stream
    finally:
        gc.enable()
    assert len(engine.buffers) == 1


def test_the_prefill_of_a_cancelled_prompt_is_counted_as_such(pipeline: WatchedPipeline) -> None:
    cancel = threading.Event()
    stream = pipeline.stream(PROMPT, raw=True, cancel=cancel)
    next(stream)
    cancel.set()
    list(stream)
    times = stream.completion.stats.time_ms
    assert times.prefill > 0
    assert times.full == 0


def test_a_text_outgrows_its_drafter_s_context(tmp_path: Path) -> None:
    """Where the drafter's buffers end, drafting does; the text goes on."""
    logits = hashed_logits(VOCAB)
    drafter = TableEngine(lambda tier, *at: logits("slim", *at), VOCAB, 40, ("full",))
    pipeline = table_pipeline(TableEngine(logits, VOCAB, 128), tmp_path, draft_with=drafter)
    options: dict[str, Any] = {"raw": True, "max_new_tokens": 90, "ignore_eos": True}
    for prompt in ("abc", "abcdefgh" * 4, PROMPT):
        found = pipeline.generate(prompt, mode="speculative", **options)
        assert found.token_ids == pipeline.generate(prompt, mode="plain", **options).token_ids
        assert len(found.token_ids) == min(90, 128 - len(prompt))
        assert (found.stats.drafted_tokens > 0) == (len(prompt) <= 40)
