"""Many sequences at once: each as it would be alone, and every KV slot comes back whatever became of its request."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.decoding.test_greedy_exactness import assert_equal_or_near_tie
from tests.support.pipelines import LETTERS, ScriptedDrafter, WatchedModel, WatchedPipeline, table_pipeline
from tests.support.table_engine import EngineFailedError, TableEngine, TableKVBuffers, hashed_logits
from via_sd.contract.generation_options import for_mode
from via_sd.runtime import BusyError, Completion, Pipeline
from via_sd.runtime.decoding.tiered_model import SequenceCaches

VOCAB = 11
MODES = ("plain", "speculative", "cascade", "routed")
THREADS, REQUESTS, LIMIT = 16, 64, 5


class CountingModel(WatchedModel):
    """Counts the sequences that hold KV at the same time."""

    held = most = 0
    _lock = threading.Lock()

    @contextmanager
    def caches(self, prompt: Sequence[int], *, wait: bool = True) -> Iterator[SequenceCaches]:
        with super().caches(prompt, wait=wait) as caches:
            with self._lock:
                self.held += 1
                self.most = max(self.most, self.held)
            try:
                yield caches
            finally:
                with self._lock:
                    self.held -= 1


class CountingPipeline(WatchedPipeline):
    """A pipeline over a counting model."""

    model_class = CountingModel
    model: CountingModel


def request(number: int) -> dict[str, Any]:
    """Request `number` of a mixed load: every mode, greedy and sampled, prompts that share beginnings."""
    given = {
        "prompt": "".join(LETTERS[(number * k) % VOCAB] for k in range(1, 4 + number % 17)),
        "mode": MODES[number % 4],
        "temperature": 0.9 if number % 3 else 0.0,
        "seed": number,
        "max_new_tokens": 20 + number % 40,
        "alpha2": 0.7,
        "raw": True,
    }
    return for_mode(given)


def run_all(work: Callable[[int], Any]) -> list[Any]:
    """`work` for every request number, on all threads at once; exceptions come back as results."""
    barrier = threading.Barrier(THREADS)

    def guarded(number: int) -> Any:
        if number < THREADS:
            barrier.wait(30)
        try:
            return work(number)
        except Exception as error:  # noqa: BLE001 - what went wrong is what is looked at
            return error

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(guarded, range(REQUESTS)))


def assert_every_slot_is_free(pipeline: Pipeline, prompt: str = "abc") -> None:
    """Exactly `LIMIT` streams can run at once, and afterwards again."""
    for _ in range(2):
        streams = [pipeline.stream(prompt, raw=True, max_new_tokens=100, mode="plain") for _ in range(LIMIT)]
        for stream in streams:
            next(stream)
        with pytest.raises(BusyError, match=f"all {LIMIT} KV slots are in use"):
            pipeline.generate(prompt, raw=True)
        for stream in streams:
            stream.close()


@pytest.mark.parametrize("kind", ["ngram", "mask", "model"])
def test_a_mixed_load_with_cancellations_and_failures_gives_what_each_request_gives_alone(
    kind: str, tmp_path: Path
) -> None:
    logits = hashed_logits(VOCAB, sharpness=1.5)
    model = TableEngine(lambda tier, *at: logits("slim", *at), VOCAB, tiers=("full",))
    alone = table_pipeline(TableEngine(logits, VOCAB), tmp_path, draft_with=model if kind == "model" else kind)
    wanted = [alone.generate(**request(number)) for number in range(REQUESTS)]

    dooms = {number: number % 4 for number in range(REQUESTS) if number % 7 == 3}  # fails from that call of its own on
    doomed = threading.local()  # a sequence takes its buffers on the thread of its reader
    doom_of: dict[int, tuple[int | None, list[None]]] = {}  # by identity of the buffers: the call, and those so far

    def fails(buffers: TableKVBuffers) -> bool:
        at, calls = doom_of[id(buffers)]
        calls.append(None)
        return at is not None and len(calls) >= at

    class DoomedModel(CountingModel):
        """Gives both buffers of a sequence the doom of the request."""

        @contextmanager
        def caches(self, prompt: Sequence[int], *, wait: bool = True) -> Iterator[SequenceCaches]:
            with super().caches(prompt, wait=wait) as caches:
                doom: tuple[int | None, list[None]] = (getattr(doomed, "at", None), [])
                for cache in (caches.verifier, caches.drafter):
                    if cache is not None:
                        doom_of[id(cache._buffers)] = doom
                yield caches

    class DoomedPipeline(CountingPipeline):
        model_class = DoomedModel

    engine = TableEngine(logits, VOCAB, fails=fails)
    model = TableEngine(model.logits, VOCAB, tiers=("full",), fails=fails)
    inner = table_pipeline(engine, tmp_path, draft_with=model if kind == "model" else kind)
    pipeline = DoomedPipeline(
        inner.bundle, engine, inner.drafter, max_sequences=LIMIT, retained_slots=3, slot_timeout=None
    )
    cancels = [threading.Event() for _ in range(REQUESTS)]

    def work(number: int) -> Completion:
        doomed.at = 1 + dooms[number] if number in dooms else None
        stream = pipeline.stream(cancel=cancels[number], **request(number))
        for count, _ in enumerate(stream):
            if number % 5 == 0 and count == 4:
                cancels[number].set()
        return stream.completion

    found = run_all(work)
    finished = cancelled = 0
    for number, (result, full) in enumerate(zip(found, wanted, strict=True)):
        if number in dooms:
            assert isinstance(result, EngineFailedError)
            continue
        assert isinstance(result, Completion), result
        if result.finish_reason == "cancelled":
            cancelled += 1
            assert number % 5 == 0
            assert result.token_ids == full.token_ids[: len(result.token_ids)]
        else:
            finished += 1
            assert (result.token_ids, result.text) == (full.token_ids, full.text)
            # Greedy drafts are as long as pays in the passes they share, so who proposed a token may differ.
            if not (result.stats.mode in ("speculative", "cascade") and request(number)["temperature"] == 0):
                assert result.tiers == full.tiers
    assert finished > 35
    assert cancelled > 3
    assert pipeline.model.most == LIMIT
    pipeline.model.slot_timeout = 0.001
    assert_every_slot_is_free(pipeline)


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("memory is read from /proc")
    gc.collect()
    return int(statm.read_text().split()[1]) * 4096


@pytest.mark.parametrize("kind", ["mask", "model"])
def test_a_mixed_load_on_a_real_engine_is_right_and_gives_its_memory_back(
    kind: str, tiny_bundle_mask_drafter: Path, tiny_bundle_model_drafter: Path
) -> None:
    path = tiny_bundle_mask_drafter if kind == "mask" else tiny_bundle_model_drafter
    pipeline = Pipeline.load(path, threads=1, max_sequences=LIMIT)
    prompts = ["Hello there", "the quick brown fox " * 4, "Hello there, how is it", "in the on the of", "x" * 90]

    def greedy(number: int) -> Completion:
        mode = MODES[number % 3]
        return pipeline.generate(prompts[number % 5], mode=mode, max_new_tokens=40, raw=True, ignore_eos=True)

    def load(number: int) -> Completion | None:
        if number % 6 == 5:
            # Somebody hangs up in the middle.
            stream = pipeline.stream(prompts[number % 5], mode="routed", temperature=1.0, raw=True, ignore_eos=True)
            next(stream), next(stream)
            stream.close()
            return None
        return greedy(number)

    wanted = {number: greedy(number) for number in range(15)}
    run_all(load)
    before = _resident_bytes()
    for _ in range(3):
        for number, result in enumerate(run_all(load)):
            if result is not None:
                assert isinstance(result, Completion), result
                assert_equal_or_near_tie(pipeline, prompts[number % 5], wanted[number % 15].token_ids, result.token_ids)
    # A slot of this model is 400 kB and logits come on top: 200 requests that leak would be seen.
    assert _resident_bytes() - before < 10e6
    pipeline.model.slot_timeout = 0.001
    assert_every_slot_is_free(pipeline)


def letters_pipeline(tmp_path: Path, **options: Any) -> WatchedPipeline:
    return table_pipeline(TableEngine(hashed_logits(VOCAB), VOCAB), tmp_path, **options)


def test_a_request_that_waits_gets_the_slot_that_comes_free(tmp_path: Path) -> None:
    pipeline = letters_pipeline(tmp_path, max_sequences=1)
    holder = pipeline.stream("abc", raw=True)
    next(holder)
    results: list[Completion] = []
    waiter = threading.Thread(target=lambda: results.append(pipeline.generate("abc", raw=True, max_new_tokens=8)))
    waiter.start()
    assert not results
    holder.close()
    waiter.join(30)
    assert len(results[0].token_ids) == 8


@pytest.mark.parametrize("how", ["close", "drop", "finish", "raise"])
def test_a_stream_gives_its_slot_back_however_it_ends(how: str, tmp_path: Path) -> None:
    pipeline = letters_pipeline(tmp_path, max_sequences=1, slot_timeout=0.001)
    stream = pipeline.stream("abcab", raw=True, max_new_tokens=9)
    next(stream)
    if how == "close":
        stream.close()
    elif how == "drop":
        del stream
        gc.collect()
    elif how == "finish":
        list(stream)
    else:
        # What goes wrong in the consumer's loop leaves the stream as it is, for whoever still holds it.
        with pytest.raises(BusyError):
            pipeline.generate("abc", raw=True)
        with pytest.raises(ZeroDivisionError), closing(stream):
            raise ZeroDivisionError
    assert pipeline.generate("abc", raw=True, max_new_tokens=4).finish_reason == "length"


def test_a_stream_that_never_begins_takes_no_slot(tmp_path: Path) -> None:
    pipeline = letters_pipeline(tmp_path, max_sequences=1, slot_timeout=0.001)
    idle = pipeline.stream("abc", raw=True)
    assert pipeline.generate("abc", raw=True, max_new_tokens=4).finish_reason == "length"
    idle.close()


@pytest.mark.parametrize("draft_with", ["ngram", "model"])
@pytest.mark.parametrize("mode", MODES)
def test_a_pipeline_is_as_good_as_new_after_a_failure_in_any_step(mode: str, draft_with: str, tmp_path: Path) -> None:
    logits = hashed_logits(VOCAB)
    options = for_mode({"mode": mode, "raw": True, "max_new_tokens": 30, "gamma": 3, "router": "paper"})
    model = TableEngine(lambda tier, *at: logits("slim", *at), VOCAB, tiers=("full",))
    fresh = table_pipeline(TableEngine(logits, VOCAB), tmp_path, draft_with=model if draft_with == "model" else "ngram")
    wanted = fresh.generate("abcabc", **options).token_ids
    for fatal in range(12):
        left = [fatal]

        def fails(buffers: TableKVBuffers, left: list[int] = left) -> bool:
            left[0] -= 1
            return left[0] == -1

        engine = TableEngine(logits, VOCAB, fails=fails)
        other = TableEngine(model.logits, VOCAB, tiers=("full",), fails=fails)
        pipeline = table_pipeline(
            engine,
            tmp_path,
            draft_with=other if draft_with == "model" else "ngram",
            max_sequences=1,
            slot_timeout=0.001,
        )
        with pytest.raises(EngineFailedError):
            pipeline.generate("abcabc", **options)
        again = pipeline.generate("abcabc", **options)
        assert again.token_ids == wanted
        assert again.stats.reused_prefix_tokens == 0, "KV of a failed step is not to be relied on"
        assert len(engine.buffers) == 2, "nor are its buffers"


def test_a_real_engine_that_fails_in_the_middle_of_a_step_serves_the_next_request(
    tiny_pipelines: dict[str, WatchedPipeline],
) -> None:
    pipeline = tiny_pipelines["ngram"]
    options: dict[str, Any] = {"raw": True, "max_new_tokens": 30, "ignore_eos": True}
    wanted = pipeline.generate("Hello there", mode="plain", **options).token_ids
    nonsense = 10**6  # no embedding has this row
    pipeline.replacement = lambda *_: ScriptedDrafter([wanted[1], nonsense])
    try:
        with pytest.raises(Exception, match=r"(?i)indices|out of|bound|range"):
            pipeline.generate("Hello there", mode="speculative", gamma=2, **options)
    finally:
        pipeline.replacement = None
    again = pipeline.generate("Hello there", mode="speculative", **options)
    assert_equal_or_near_tie(pipeline, "Hello there", wanted, again.token_ids)


def test_a_slot_that_cannot_be_allocated_does_not_count_as_taken(tmp_path: Path) -> None:
    class Full(TableEngine):
        """An engine out of memory, once."""

        tries = 0

        def new_buffers(self) -> TableKVBuffers:
            self.tries += 1
            if self.tries == 1:
                raise MemoryError
            return super().new_buffers()

    pipeline = table_pipeline(Full(hashed_logits(VOCAB), VOCAB), tmp_path, max_sequences=1, slot_timeout=0.001)
    with pytest.raises(MemoryError):
        pipeline.generate("abc", raw=True)
    assert pipeline.generate("abc", raw=True, max_new_tokens=4).finish_reason == "length"
