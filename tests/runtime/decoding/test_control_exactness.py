"""Penalties, biases and constraints in every mode: exact modes emit what plain emits, and nothing that is ruled out."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.distributions import Tally, brute_force_probabilities
from tests.support.pipelines import LETTERS, ScriptedDrafter, WatchedPipeline, table_pipeline
from tests.support.table_engine import TableEngine, hashed_logits, markov_logits
from via_sd.errors import RequestError
from via_sd.runtime import GenerationConfig

MODES = ("plain", "speculative", "cascade", "routed")
DRAFTERS = ("ngram", "mask", "model")
VOCAB, EOS = 8, 7
#: A false alarm in one case in ten thousand.
ALPHA = 1e-4
LOGITS = markov_logits(VOCAB, sharpness=0.9, slim=0.5, deep=0.8)


def build(kind: str, directory: Path, logits: Any, vocab: int = VOCAB, eos: Sequence[int] = (EOS,)) -> WatchedPipeline:
    engine = TableEngine(logits, vocab, 128)
    model = TableEngine(lambda tier, *at: logits("deep", *at), vocab, 128, ("full",))
    drafter = {"mask": "mask", "model": model}.get(kind, "ngram")
    return table_pipeline(engine, directory, draft_with=drafter, eos=eos)


def no_token_twice_in_a_row(tokens: list[int], logits: np.ndarray) -> np.ndarray:
    """A caller's own processor."""
    logits[tokens[-1]] = -np.inf
    return logits


def ruled(
    logits: Sequence[float], params: GenerationConfig, prompt: Sequence[int], answer: Sequence[int]
) -> list[float]:
    """Brute force: the logits after a request's rules, one token at a time."""
    values = [float(x) for x in logits]
    for token in set(prompt) | set(answer):
        values[token] *= 1 / params.repetition_penalty if values[token] > 0 else params.repetition_penalty
    for token, count in Counter(answer).items():
        values[token] -= params.presence_penalty + count * params.frequency_penalty
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    for token in params.suppress_tokens or ():
        values[token] = -math.inf
    text = "".join(LETTERS[token] for token in (*prompt, *answer))
    if n := params.no_repeat_ngram_size:
        for token in range(len(values)):
            if len(text) >= n and (text[len(text) - n + 1 :] + LETTERS[token]) in text:
                values[token] = -math.inf
    for word in params.bad_words or ():
        if (text + word[-1]).endswith(word):
            values[LETTERS.index(word[-1])] = -math.inf
    if len(answer) < (params.min_new_tokens or 0):
        values[EOS] = -math.inf
    return values


RULES: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
    "bans": {
        "logit_bias": {0: 1.0, 3: -0.5}, "suppress_tokens": [2], "bad_words": ["ab", "d"], "no_repeat_ngram_size": 3,
        "min_new_tokens": 9,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "kind", "rules"),
    [
        ("plain", "ngram", "bans"),
        ("plain", "ngram", "penalties"),
        ("speculative", "ngram", "bans"),
        ("speculative", "model", "penalties"),
        ("cascade", "mask", "bans"),
        ("cascade", "ngram", "penalties"),
    ],
)
def test_an_exact_mode_emits_the_probabilities_that_the_rules_leave(
    mode: str, kind: str, rules: str, tmp_path: Path
) -> None:
    pipeline = build(kind, tmp_path, LOGITS)
    given_ = {"temperature": 0.9, "top_k": 6, **RULES[rules]}
    params, tally = GenerationConfig(**given_), Tally(VOCAB)
    prompt = pipeline.encode("abcabca")
    for seed in range(260):
        gamma = (None, 1, 4)[seed % 3]
        found = pipeline.generate("abcabca", mode=mode, seed=seed, gamma=gamma, max_new_tokens=24, **given_)
        answer = found.token_ids
        for at, token in enumerate(answer):
            context = [*prompt, *answer[:at]]
            values = ruled(LOGITS("full", (context[-1],), 0).tolist(), params, prompt, answer[:at])
            plain = GenerationConfig(temperature=0.9, top_k=6)
            tally.add(context[-1], token, brute_force_probabilities(values, plain, ()))
    assert tally.impossible == 0
    assert tally.p_value() > ALPHA
    assert tally.p_value(shift=0.1) < ALPHA, "the sample is too small to see an error of 10 %"


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    tokens = st.integers(0, VOCAB - 1)
    prompt = draw(st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=20))
    return {
        "prompt": prompt,
        "slim": draw(st.sampled_from((0.0, 0.3, 1.0))),
        "options": {
            "gamma": draw(st.one_of(st.none(), st.integers(1, 9))),
            "max_new_tokens": draw(st.integers(1, 40)),
            "presence_penalty": draw(st.sampled_from((0.0, -1.0, 1.5))),
            "frequency_penalty": draw(st.sampled_from((0.0, 0.7))),
            "logit_bias": draw(st.dictionaries(tokens, st.integers(-5, 5), max_size=3)),
            "suppress_tokens": draw(st.lists(tokens, max_size=2)),
            "bad_words": draw(st.lists(st.text("abcd", min_size=1, max_size=3), max_size=2)),
            "no_repeat_ngram_size": draw(st.sampled_from((0, 2, 3, 4))),
            "min_new_tokens": draw(st.integers(0, 20)),
            "stop_token_ids": draw(st.lists(tokens, max_size=1)),
        },
        "custom": draw(st.booleans()),
    }


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("mode", ["speculative", "cascade"])
def test_an_exact_mode_emits_what_plain_emits(kind: str, mode: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("pipelines")

    @given(cases())
    @settings(max_examples=60, derandomize=True, deadline=None)
    def check(case: dict[str, Any]) -> None:
        pipeline = build(kind, directory, hashed_logits(VOCAB, slim=case["slim"], deep=case["slim"]))
        processors = [no_token_twice_in_a_row] if case["custom"] else []

        def answer(mode: str) -> Any:
            try:
                found = pipeline.generate(case["prompt"], mode=mode, logits_processors=processors, **case["options"])
            except RequestError as error:  # rules that contradict each other do so in every mode
                return str(error)
            return found.token_ids, found.text, found.finish_reason

        assert answer(mode) == answer("plain")

    check()


@pytest.mark.parametrize("mode", MODES)
def test_a_drafted_token_that_is_ruled_out_is_never_put_to_a_verifier(mode: str, tmp_path: Path) -> None:
    pipeline = build("ngram", tmp_path, LOGITS)
    pipeline.replacement = lambda *_: ScriptedDrafter(*[[0, 1, 2, 3]] * 40)
    found = pipeline.generate("a", mode=mode, bad_words=["bc"], seed=1, temperature=1.0, max_new_tokens=30)
    assert "bc" not in found.text
    fed = [call.tokens for buffers in pipeline.verifier.buffers for call in buffers.calls]  # type: ignore[attr-defined]
    assert not any((1, 2) in itertools.pairwise(tokens) for tokens in fed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_routed_and_all_others_keep_the_rules(mode: str, temperature: float, tmp_path: Path) -> None:
    pipeline = build("mask", tmp_path, LOGITS)
    for seed in range(20):
        found = pipeline.generate(
            "abcab", mode=mode, seed=seed, temperature=temperature, suppress_tokens=[0], min_new_tokens=12,
            bad_words=["cd"], max_new_tokens=30,
        )  # fmt: skip
        assert 0 not in found.token_ids
        assert EOS not in found.token_ids[:12]
        assert "cd" not in found.text


@pytest.mark.parametrize("mode", MODES)
def test_rules_that_leave_no_token_are_an_error_of_the_request(mode: str, tmp_path: Path) -> None:
    pipeline = build("ngram", tmp_path, LOGITS)
    with pytest.raises(RequestError, match="rules out every token at position 1: its constraints contradict"):
        pipeline.generate("a", mode=mode, suppress_tokens=list(range(VOCAB)))


@pytest.mark.parametrize(
    ("process", "says"),
    [
        (lambda tokens, logits: logits[:3], r"returned an array of shape \[3\], wanted \[8\]"),
        (lambda tokens, logits: logits * np.nan, "largest logit that a logits processor returned is nan"),
        (lambda tokens, logits: logits - np.inf, "largest logit that a logits processor returned is -inf"),
    ],
)
def test_what_a_callers_processor_returns_is_checked(process: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=says):
        build("ngram", tmp_path, LOGITS).generate("a", logits_processors=[process])
