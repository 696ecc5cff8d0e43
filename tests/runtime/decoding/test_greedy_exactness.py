"""Greedy output of every exact mode is that of plain decoding, whoever drafts and whatever is accepted or rejected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.pipelines import LETTERS, AdversarialDrafter, WatchedPipeline, table_pipeline
from tests.support.table_engine import TableEngine, hashed_logits
from via_sd.runtime import Pipeline

DRAFTERS = ("ngram", "mask", "model", "adversarial")
EXACT_DRAFTING_MODES = ("speculative", "cascade")


def continuation(plain: Sequence[int], prompt_tokens: int) -> Any:
    """Oracle for `AdversarialDrafter`: what plain decoding emitted at that position."""

    def right(sequence: Sequence[int]) -> int | None:
        at = len(sequence) - prompt_tokens
        return plain[at] if at < len(plain) else None

    return right


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    vocab_size = draw(st.integers(3, 8))
    capacity = draw(st.integers(2, 60))
    length = draw(st.one_of(st.just(1), st.just(capacity - 1), st.integers(1, capacity - 1)))
    return {
        "vocab_size": vocab_size,
        "capacity": capacity,
        "prompt": "".join(draw(st.lists(st.sampled_from(LETTERS[:vocab_size]), min_size=length, max_size=length))),
        "seed": draw(st.integers(0, 2**20)),
        "slim": draw(st.sampled_from((0.0, 0.3, 1.0))),
        "options": {
            "max_new_tokens": draw(st.integers(1, 60)),
            "gamma": draw(st.one_of(st.none(), st.integers(1, 9))),
            "repetition_penalty": draw(st.sampled_from((1.0, 1.3))),
            "raw": True,
        },
    }


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("mode", EXACT_DRAFTING_MODES)
def test_an_exact_mode_emits_what_plain_emits(kind: str, mode: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("pipelines")

    @given(cases())
    @settings(max_examples=400, derandomize=True, deadline=None)
    def check(case: dict[str, Any]) -> None:
        # The engine itself refuses holes, KV of too low a tier, overwritten better KV, and positions past the buffer.
        logits = hashed_logits(case["vocab_size"], slim=case["slim"])
        engine = TableEngine(logits, case["vocab_size"], case["capacity"])
        pipeline = table_pipeline(engine, directory, draft_with=_drafter(kind, case))
        prompt, options = case["prompt"], case["options"]
        plain = pipeline.generate(prompt, mode="plain", **options)
        assert len(plain.token_ids) == min(options["max_new_tokens"], case["capacity"] - len(prompt))
        if kind == "adversarial":
            right = continuation(plain.token_ids, len(prompt))
            pipeline.replacement = lambda *_: AdversarialDrafter(case["vocab_size"], right, case["seed"])
        found = pipeline.generate(prompt, mode=mode, **options)
        assert found.token_ids == plain.token_ids
        assert (found.text, found.finish_reason) == (plain.text, plain.finish_reason)

    check()


def _drafter(kind: str, case: dict[str, Any]) -> str | TableEngine:
    if kind == "model":
        # Another model that mostly agrees; its own KV is as strict.
        logits = hashed_logits(case["vocab_size"], slim=case["slim"])
        return TableEngine(lambda tier, *at: logits("slim", *at), case["vocab_size"], case["capacity"], ("full",))
    return "mask" if kind == "mask" else "ngram"


@pytest.mark.parametrize("penalty", [1.0, 1.2])
@pytest.mark.parametrize("mode", EXACT_DRAFTING_MODES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_an_exact_mode_emits_what_plain_emits_on_a_real_engine(
    kind: str, mode: str, penalty: float, tiny_pipelines: dict[str, WatchedPipeline]
) -> None:
    pipeline = tiny_pipelines["ngram" if kind == "adversarial" else kind]
    accepted = 0
    for prompt in ("Hello there", "in the on the", "a", "x" * 200, "The quick brown fox jumps over the lazy dog. " * 3):
        options: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True, "repetition_penalty": penalty, "raw": True}
        plain = pipeline.generate(prompt, mode="plain", logprobs=2, **options)
        if kind == "adversarial":
            right = continuation(plain.token_ids, plain.prompt_tokens)
            drafter = AdversarialDrafter(pipeline.verifier.vocab_size, right, len(prompt))
            pipeline.replacement = lambda *_, drafter=drafter: drafter
        try:
            found = pipeline.generate(prompt, mode=mode, **options)
        finally:
            pipeline.replacement = None
        assert_equal_or_near_tie(pipeline, prompt, plain.token_ids, found.token_ids, penalty)
        accepted += found.stats.accepted_tokens
    assert accepted > 0


def assert_equal_or_near_tie(
    pipeline: Pipeline, prompt: str, plain: Sequence[int], found: Sequence[int], penalty: float = 1.0
) -> None:
    """Where two greedy texts part, the two tokens' logits there differ by float32 rounding alone."""
    if list(plain) == list(found):
        return
    at = next(i for i, (a, b) in enumerate(zip(plain, found, strict=True)) if a != b)
    tokens = pipeline.encode(prompt, raw=True) + list(plain[:at])
    row = pipeline.verifier.new_buffers().forward("full", tokens, 0, 1)[0].logits.astype(np.float64)
    seen = np.unique(tokens)
    row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    margin = row[plain[at]] - row[found[at]]
    assert abs(margin) < 1e-3, f"token {at}: {found[at]} for {plain[at]}, {margin:.2g} below it"
