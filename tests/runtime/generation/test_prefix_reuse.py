"""A request that begins like a finished one skips that much prefill, and is otherwise none the wiser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.decoding.test_greedy_exactness import assert_equal_or_near_tie
from tests.support.pipelines import LETTERS, WatchedPipeline, table_pipeline
from tests.support.table_engine import TableEngine, hashed_logits
from via_sd.contract.generation_options import for_mode

VOCAB = 8
CAPACITY = 128
MODES = ("plain", "speculative", "cascade", "routed")
TURNS = st.lists(
    st.fixed_dictionaries(
        {
            "mode": st.sampled_from(MODES),
            "keep": st.integers(0, 60),  # tokens of the text so far that the next prompt begins with
            "then": st.text(LETTERS[:VOCAB], min_size=1, max_size=6),
            "max_new_tokens": st.integers(1, 25),
            "temperature": st.sampled_from((0.0, 0.9)),
            "seed": st.integers(0, 50),
            "hang_up": st.booleans(),
        }
    ),
    min_size=2,
    max_size=6,
)


@pytest.mark.parametrize("kind", ["ngram", "mask", "model"])
def test_any_turn_of_a_chat_is_what_it_would_be_cold(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("pipelines")
    logits = hashed_logits(VOCAB)

    def build(retained: int) -> WatchedPipeline:
        # Long prompts are fed in chunks; what is reused then changes their number, which nothing may depend on.
        engine = TableEngine(logits, VOCAB, CAPACITY, prefill_chunk=6)
        model = TableEngine(lambda tier, *at: logits("slim", *at), VOCAB, CAPACITY, ("full",), prefill_chunk=6)
        draft_with: Any = model if kind == "model" else kind
        return table_pipeline(engine, directory, draft_with=draft_with, retained_slots=retained)

    @given(turns=TURNS, retained=st.integers(1, 3))
    @settings(max_examples=120, derandomize=True, deadline=None)
    def check(turns: list[dict[str, Any]], retained: int) -> None:
        warm, cold = build(retained), build(0)
        text = ""
        for turn in turns:
            prompt = (text[: turn["keep"]] + turn["then"])[: CAPACITY - 30]
            options = {k: v for k, v in turn.items() if k not in ("keep", "then", "hang_up")}
            # Loose gates leave slim's KV behind where full has not been.
            options = for_mode({**options, "raw": True, "alpha2": 1.0, "router": "paper", "gamma": 3})
            if turn["hang_up"]:
                stream = warm.stream(prompt, **options)
                next(stream)
                stream.close()
            found, wanted = warm.generate(prompt, **options), cold.generate(prompt, **options)
            assert (found.token_ids, found.tiers, found.text) == (wanted.token_ids, wanted.tiers, wanted.text)
            assert wanted.stats.reused_prefix_tokens == 0
            assert found.stats.reused_prefix_tokens < found.prompt_tokens, "the last row is always computed"
            text = prompt + found.text

    check()


def test_the_next_turn_of_a_chat_feeds_only_what_is_new(tmp_path: Path) -> None:
    engine = TableEngine(hashed_logits(VOCAB), VOCAB, CAPACITY)
    pipeline = table_pipeline(engine, tmp_path)
    first = pipeline.generate("abcdefgh", mode="plain", raw=True, max_new_tokens=10)
    history = 8 + 10
    engine.buffers[0].calls.clear()
    second = pipeline.generate("abcdefgh" + first.text + "aab", mode="plain", raw=True, max_new_tokens=5)
    # The last token of the first answer was fed to nobody yet.
    assert second.stats.reused_prefix_tokens == history - 1
    assert len(engine.buffers) == 1
    assert len(engine.buffers[0].calls[0].tokens) == 4
    assert engine.buffers[0].calls[0].past == history - 1


def test_the_same_prompt_again_feeds_its_last_two_tokens(tmp_path: Path) -> None:
    pipeline = table_pipeline(TableEngine(hashed_logits(VOCAB), VOCAB, CAPACITY), tmp_path)
    first = pipeline.generate("abcdefgh", raw=True, max_new_tokens=10)
    again = pipeline.generate("abcdefgh", raw=True, max_new_tokens=10)
    assert again.token_ids == first.token_ids
    assert again.stats.reused_prefix_tokens == 6
    for prompt in ("ab", "a"):
        for _ in range(2):
            found = pipeline.generate(prompt, raw=True, max_new_tokens=3)
        assert found.stats.reused_prefix_tokens == 0


def test_what_only_slim_has_computed_is_no_prefix(tmp_path: Path) -> None:
    engine = TableEngine(hashed_logits(VOCAB, slim=0.1), VOCAB, CAPACITY)
    pipeline = table_pipeline(engine, tmp_path)
    first = pipeline.generate(
        "abcd", mode="routed", alpha2=1.0, alpha1=1.0, router="paper", raw=True, max_new_tokens=30, ignore_eos=True
    )
    length = pipeline.current.verifier.lengths["full"]
    assert length < 4 + 20, "much of this text was accepted by slim alone"
    second = pipeline.generate("abcd" + first.text + "a", mode="plain", raw=True, max_new_tokens=3)
    assert second.stats.reused_prefix_tokens == length


def test_no_more_slots_are_kept_than_asked_for(tmp_path: Path) -> None:
    engine = TableEngine(hashed_logits(VOCAB), VOCAB, CAPACITY)
    pipeline = table_pipeline(engine, tmp_path, retained_slots=2)
    prompts = ["abcd", "bcda", "cdab", "dabc"]
    for prompt in prompts:
        pipeline.generate(prompt, raw=True, max_new_tokens=3)
    assert len(engine.buffers) == 2, "an idle slot is taken over rather than another one allocated"
    reused = [
        pipeline.generate(prompt, raw=True, max_new_tokens=3).stats.reused_prefix_tokens for prompt in prompts[::-1]
    ]
    assert reused[:2] == [2, 2], "the ones used last are kept"
    none = table_pipeline(TableEngine(hashed_logits(VOCAB), VOCAB, CAPACITY), tmp_path, retained_slots=0)
    for _ in range(2):
        assert none.generate("abcd", raw=True, max_new_tokens=3).stats.reused_prefix_tokens == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["ngram", "mask", "model"])
def test_a_second_turn_on_a_real_engine_is_what_it_would_be_cold(
    kind: str, mode: str, tiny_pipelines: dict[str, WatchedPipeline]
) -> None:
    pipeline = tiny_pipelines[kind]
    options: dict[str, Any] = {"raw": True, "max_new_tokens": 40, "ignore_eos": True, "alpha2": 0.8, "router": "paper"}
    first = pipeline.generate("The quick brown fox", mode="routed", **options)
    prompt = "The quick brown fox" + first.text + " and then"
    options = for_mode({**options, "mode": mode})
    warm = pipeline.generate(prompt, **options)
    assert warm.stats.reused_prefix_tokens > 15
    cold = WatchedPipeline(
        pipeline.bundle, pipeline.verifier, pipeline.drafter, max_sequences=1, retained_slots=0, slot_timeout=None
    ).generate(prompt, **options)
    assert cold.stats.reused_prefix_tokens == 0
    if mode == "routed":
        # A gate may fall either way by rounding; far more often the texts are the same.
        assert warm.token_ids[:10] == cold.token_ids[:10]
    else:
        assert_equal_or_near_tie(pipeline, prompt, cold.token_ids, warm.token_ids)
