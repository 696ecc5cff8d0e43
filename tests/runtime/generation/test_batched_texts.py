"""Texts that are decoded together: each is what it would be alone, and they do share passes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.pipelines import LETTERS, WatchedPipeline, table_pipeline
from tests.support.table_engine import TableEngine, hashed_logits
from tests.support.tiny import MAX_SEQ_LEN
from via_sd.contract.generation_options import for_mode
from via_sd.errors import RequestError
from via_sd.runtime import Completion, GenerationConfig, Pipeline

VOCAB = 11
MODES = ("plain", "speculative", "cascade", "routed")


def letters(tmp_path: Path, **options: Any) -> tuple[WatchedPipeline, TableEngine]:
    engine = TableEngine(hashed_logits(VOCAB, sharpness=1.5), VOCAB)
    return table_pipeline(engine, tmp_path, **options), engine


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_list_of_prompts_gives_the_texts_of_each_alone(mode: str, temperature: float, tmp_path: Path) -> None:
    pipeline, engine = letters(tmp_path, max_sequences=4)
    prompts = ["".join(LETTERS[(number * k) % VOCAB] for k in range(1, 5 + number)) for number in range(9)]
    options: dict[str, Any] = {"mode": mode, "temperature": temperature, "seed": 3, "raw": True, "max_new_tokens": 30}
    found = pipeline.generate(prompts, **options)
    shared = [len(p.blocks) for p in engine.passes]
    assert max(shared) == 4
    assert sum(shared) / len(shared) > 2
    for completion, prompt in zip(found, prompts, strict=True):
        alone = pipeline.generate(prompt, **options)
        assert (completion.text, completion.token_ids) == (alone.text, alone.token_ids)


def test_each_prompt_of_a_list_may_ask_for_something_else(tmp_path: Path) -> None:
    pipeline, _ = letters(tmp_path)
    configs = [GenerationConfig(mode=mode, raw=True, max_new_tokens=10 + n, seed=n) for n, mode in enumerate(MODES)]
    found = pipeline.generate(["abc"] * 4, configs)
    assert [completion.stats.mode for completion in found] == list(MODES)
    assert [len(completion.token_ids) for completion in found] == [10, 11, 12, 13]
    with pytest.raises(RequestError, match="4 configs for 3 prompts"):
        pipeline.generate(["abc"] * 3, configs)


def test_a_list_is_cancelled_as_a_whole_and_gives_its_slots_back(tmp_path: Path) -> None:
    pipeline, _ = letters(tmp_path, max_sequences=2, slot_timeout=0.001)
    cancel = threading.Event()
    cancel.set()
    found = pipeline.generate(["abc", "bcd", "cde"], raw=True, cancel=cancel)
    assert [completion.finish_reason for completion in found] == ["cancelled"] * 3
    assert len(pipeline.generate(["abc", "bcd"], raw=True, max_new_tokens=5)) == 2


def test_one_stream_alone_takes_one_pass_a_token(tmp_path: Path) -> None:
    pipeline, engine = letters(tmp_path)
    pipeline.generate("abc", mode="plain", raw=True, max_new_tokens=12)
    assert [p.blocks[0][0] for p in engine.passes] == [3, *[1] * 11]


#: What a client does: (prompt, mode, greedy, how many chunks it reads before it hangs up; None: all of them).
CLIENTS = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from(MODES), st.booleans(), st.one_of(st.none(), st.integers(0, 6))),
    min_size=1,
    max_size=8,
)


@given(clients=CLIENTS, seed=st.integers(0, 50))
@settings(max_examples=40, derandomize=True, deadline=None)
def check_interleaved_clients(pipeline: WatchedPipeline, clients: list[Any], seed: int) -> None:
    """Clients of one thread that read in random turns, join late and hang up early."""
    rng = np.random.default_rng(seed)

    def options(number: int) -> dict[str, Any]:
        size, mode, greedy, _ = clients[number]
        prompt = "".join(LETTERS[k * k % VOCAB] for k in range(size))  # each begins like the others
        sampling: dict[str, Any] = {"temperature": 0.0 if greedy else 0.8, "seed": number}
        given = {"prompt": prompt, "mode": mode, "raw": True, "max_new_tokens": 25, "alpha2": 0.7, **sampling}
        return for_mode(given)

    wanted = [pipeline.generate(**options(number)) for number in range(len(clients))]
    streams = {number: pipeline.stream(**options(number)) for number in range(len(clients))}
    read: dict[int, list[int]] = {number: [] for number in streams}
    chunks = dict.fromkeys(streams, 0)
    while streams:
        number = int(rng.choice(list(streams)))
        stop = clients[number][3]
        chunk = None if stop is not None and chunks[number] >= stop else next(streams[number], None)
        if chunk is not None:
            chunks[number] += 1
            read[number] += chunk.token_ids
            continue
        stream = streams.pop(number)
        if stop is None:
            assert isinstance(stream.completion, Completion)
            assert stream.completion.token_ids == wanted[number].token_ids == read[number]
            assert stream.completion.text == wanted[number].text
        stream.close()
        assert read[number] == wanted[number].token_ids[: len(read[number])]


def test_clients_that_come_and_go_in_any_order_get_the_texts_they_would_get_alone(tmp_path: Path) -> None:
    pipeline, _ = letters(tmp_path)
    check_interleaved_clients(pipeline)


def test_what_a_running_sequence_has_read_is_copied_for_one_that_begins_like_it(tmp_path: Path) -> None:
    pipeline, engine = letters(tmp_path, retained_slots=0)
    system = "".join(LETTERS[k * k % VOCAB] for k in range(60))
    options: dict[str, Any] = {"raw": True, "mode": "cascade", "max_new_tokens": 20}
    alone = [pipeline.generate(system + end, **options) for end in "abc"]
    assert [completion.stats.reused_prefix_tokens for completion in alone] == [0, 0, 0]
    first = pipeline.stream(system + "a", **options)
    next(first)
    engine.passes.clear()
    found = pipeline.generate([system + "b", system + "c"], **options)
    assert [completion.stats.reused_prefix_tokens for completion in found] == [59, 59]
    assert max(count for p in engine.passes for count, _ in p.blocks) < 20, "a prompt was read again"
    for _ in first:
        pass
    assert [c.token_ids for c in (first.completion, *found)] == [c.token_ids for c in alone]


# -- real engines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_deterministic_passes_make_modes_and_batches_agree_bit_for_bit(
    precision: str, tmp_path: Path, tiny_checkpoint: Path, tiny_masks: tuple[Path, Path]
) -> None:
    """Log-probabilities of every token are equal, not close: alone, in a list, in every exact mode."""
    from via_sd.export import export_bundle

    bundle = tmp_path / "bundle"
    export_bundle(tiny_checkpoint, bundle, masks=[tiny_masks[0]], precision=precision, max_seq_len=MAX_SEQ_LEN)
    pipeline = Pipeline.load(bundle, threads=1, deterministic=True)
    prompts = ["Hello there", "the quick brown fox " * 4, "in the on the of", "x" * 90, "the in of the"]
    options: dict[str, Any] = {"raw": True, "ignore_eos": True, "max_new_tokens": 40, "logprobs": 0}
    wanted = [pipeline.generate(prompt, mode="plain", **options) for prompt in prompts]
    for mode in ("plain", "speculative", "cascade"):
        for found, alone in zip(pipeline.generate(prompts, mode=mode, **options), wanted, strict=True):
            assert found.token_ids == alone.token_ids
            assert found.logprobs == alone.logprobs
