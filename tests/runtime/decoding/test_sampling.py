"""Probabilities against float64 brute force, draws against probabilities, and the keyed random stream."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from tests.support.distributions import brute_force_probabilities
from tests.support.pipelines import WatchedPipeline, table_pipeline
from tests.support.table_engine import TableEngine, digest_of, hashed_logits
from via_sd.contract.generation_options import for_mode
from via_sd.runtime import GenerationConfig, RequestError
from via_sd.runtime.decoding.random_stream import Purpose, RandomStream
from via_sd.runtime.decoding.sampling import Processor, draw
from via_sd.runtime.decoding.verification import acceptance, residual
from via_sd.runtime.engines.rows import HostRow

VOCAB = 12
ROWS = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=VOCAB)
PARAMS = st.builds(
    GenerationConfig,
    temperature=st.one_of(st.floats(0.05, 5), st.sampled_from((1e-320, 1e-30, 1e6))),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 0.99)),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.5, 2)),
)
WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1)), min_size=2, max_size=VOCAB)


@given(row=ROWS, params=PARAMS, context=st.lists(st.integers(0, VOCAB - 1), max_size=6), split=st.integers(0, 6))
@settings(max_examples=1500, derandomize=True, deadline=None)
def test_the_probabilities_of_a_row_are_those_of_brute_force(
    row: list[float], params: GenerationConfig, context: list[int], split: int
) -> None:
    logits = np.array(row, np.float32)
    seen = [token for token in context if token < len(row)]
    wanted = brute_force_probabilities(logits.tolist(), params, seen)
    probabilities = Processor(params).probabilities(HostRow(logits), seen[:split], seen[split:])
    assert probabilities.sum() == pytest.approx(1)
    # On the very edge of a truncation rounding decides; elsewhere the distributions are equal.
    edge = [
        {**vars(params), "top_p": min(1.0, params.top_p * (1 + sign * 1e-5)), "min_p": params.min_p * (1 + sign * 1e-5)}
        for sign in (-1, 1)
    ]
    assume(
        all(np.allclose(brute_force_probabilities(logits.tolist(), GenerationConfig(**e), seen), wanted) for e in edge)
    )
    np.testing.assert_allclose(probabilities, wanted, atol=1e-6, rtol=1e-4)


@given(row=ROWS, context=st.lists(st.integers(0, VOCAB - 1), max_size=6), penalty=st.sampled_from((1.0, 0.7, 1.8)))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_the_greedy_token_is_the_likeliest_at_any_temperature(
    row: list[float], context: list[int], penalty: float
) -> None:
    logits = np.array([row, row[::-1]], np.float32)
    draft = [token for token in context if token < len(row)]
    greedy = Processor(GenerationConfig(repetition_penalty=penalty))
    sampler = Processor(GenerationConfig(temperature=0.7, repetition_penalty=penalty))
    for j in range(2):
        token = greedy.best(HostRow(logits[j]), [0], draft[:j])
        probabilities = sampler.probabilities(HostRow(logits[j]), [0], draft[:j])
        assert probabilities[token] == probabilities.max()


@given(probabilities=WEIGHTS, u=st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2**-53)))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_a_draw_is_the_quantile_of_its_number_and_never_impossible(probabilities: list[float], u: float) -> None:
    assume(sum(probabilities) > 0)
    weights = np.array(probabilities) / sum(probabilities)
    token = draw(weights, u)
    assert weights[token] > 0
    assert weights[:token].sum() <= u + 1e-12
    assert u - 1e-12 <= weights[: token + 1].sum()


def uniform(seed: int, attempt: int, position: int, purpose: Purpose) -> float:
    """The number of a new stream."""
    stream = RandomStream(seed)
    stream.attempt = attempt
    return stream.uniform(position, purpose)


def test_draws_follow_their_probabilities() -> None:
    probabilities = np.array([0.4, 0.0, 0.25, 0.2, 0.1, 0.05, 0.0])
    drawn = np.bincount(
        [draw(probabilities, uniform(3, 0, i, Purpose.FULL_TOKEN)) for i in range(20_000)], minlength=len(probabilities)
    )
    assert drawn[probabilities == 0].sum() == 0
    assert stats.chisquare(drawn[probabilities > 0], 20_000 * probabilities[probabilities > 0]).pvalue > 1e-3


@given(target=WEIGHTS, proposal=st.one_of(st.none(), WEIGHTS), token=st.integers(0, VOCAB - 1))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_keeping_or_replacing_a_draft_adds_up_to_the_target(
    target: list[float], proposal: list[float] | None, token: int
) -> None:
    size = min(len(target), len(proposal or target))
    q = np.array(target[:size])
    assume(q.sum() > 0)
    q /= q.sum()
    token %= size
    if proposal is None:
        # A point mass: whatever it is on, what comes out is the target.
        kept = acceptance(q, None, token)
        out = kept * np.eye(size)[token] + (1 - kept) * residual(q, None, token)
        np.testing.assert_allclose(out, q, atol=1e-12)
        return
    p = np.array(proposal[:size])
    assume(p.sum() > 0)
    p /= p.sum()
    out = np.zeros(size)
    for drafted in np.flatnonzero(p):
        kept = acceptance(q, p, int(drafted))
        assert 0 <= kept <= 1
        rest = residual(q, p, int(drafted)) if kept < 1 else np.zeros(size)
        out += p[drafted] * (kept * np.eye(size)[drafted] + (1 - kept) * rest)
    np.testing.assert_allclose(out, q, atol=1e-9)


def test_the_random_stream_is_uniform_whichever_part_of_its_key_counts() -> None:
    base = {"seed": 7, "attempt": 5, "position": 11, "purpose": Purpose.FULL_TEST}
    for key in ("seed", "attempt", "position"):
        numbers = [uniform(**{**base, key: i}) for i in range(5000)]
        assert 0 <= min(numbers) <= max(numbers) < 1
        assert stats.kstest(numbers, "uniform").pvalue > 1e-3
        # Neighbouring keys are independent: pairs fill the square.
        pairs, _, _ = np.histogram2d(numbers[0::2], numbers[1::2], bins=5)
        assert stats.chisquare(pairs.ravel()).pvalue > 1e-3


def test_numbers_for_different_purposes_are_independent() -> None:
    streams = [[uniform(1, i, i, purpose) for i in range(4000)] for purpose in Purpose]
    for one, other in itertools.combinations(streams, 2):
        assert stats.chisquare(np.histogram2d(one, other, bins=5)[0].ravel()).pvalue > 1e-3


def test_the_numbers_of_a_stream_are_those_of_new_streams_in_any_order() -> None:
    stream = RandomStream(2**64 - 1)
    for attempt, position, purpose in [(3, 9, Purpose.DRAFT), (0, 2**40, Purpose.FULL_TEST), (3, 9, Purpose.DRAFT)]:
        stream.attempt = attempt
        assert stream.uniform(position, purpose) == uniform(2**64 - 1, attempt, position, purpose)
        philox = np.random.Philox(key=2**64 - 1, counter=[0, attempt, int(purpose), position])
        assert stream.uniform(position, purpose) == float(philox.random_raw() >> 11) * 2.0**-53


def test_no_two_keys_of_a_text_share_a_number() -> None:
    keys = list(itertools.product((0, 1, 2**64 - 1), range(20), range(20), Purpose))
    assert len({uniform(*key) for key in keys}) == len(keys)


@pytest.mark.parametrize("kind", ["ngram", "mask", "model"])
@pytest.mark.parametrize("mode", ["plain", "speculative", "cascade", "routed"])
def test_no_random_number_is_used_twice_in_a_text(
    mode: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[tuple[int, ...]] = []

    number = RandomStream.uniform

    def recorded(stream: RandomStream, position: int, purpose: Purpose) -> float:
        used.append((stream.seed, stream.attempt, position, purpose))
        return number(stream, position, purpose)

    monkeypatch.setattr(RandomStream, "uniform", recorded)
    logits = hashed_logits(VOCAB, sharpness=1.0)
    model = TableEngine(lambda tier, *at: logits("slim", *at), VOCAB, tiers=("full",))
    pipeline = table_pipeline(TableEngine(logits, VOCAB), tmp_path, draft_with=model if kind == "model" else kind)
    for seed in range(6):
        used.clear()
        pipeline.generate(
            "abcab", raw=True, seed=seed, temperature=1.0, max_new_tokens=150, gamma=4,
            **for_mode({"mode": mode, "alpha2": 0.8, "router": "paper"}),
        )  # fmt: skip
        assert len(used) >= 150 or mode == "routed"
        assert len(set(used)) == len(used)


@pytest.mark.parametrize("kind", ["ngram", "mask", "model"])
@pytest.mark.parametrize("mode", ["plain", "speculative", "cascade", "routed"])
def test_a_seed_names_one_output(mode: str, kind: str, tmp_path: Path) -> None:
    logits = hashed_logits(VOCAB, sharpness=1.0)
    model = TableEngine(lambda tier, *at: logits("slim", *at), VOCAB, tiers=("full",))
    draft_with: Any = model if kind == "model" else kind
    options: dict[str, Any] = {"mode": mode, "temperature": 1.0, "max_new_tokens": 60, "raw": True, "top_p": 0.95}

    def text(pipeline: WatchedPipeline, seed: int) -> list[int]:
        return pipeline.generate("abcab", seed=seed, **options).token_ids

    alone = table_pipeline(TableEngine(logits, VOCAB), tmp_path, draft_with=draft_with)
    wanted = {seed: text(alone, seed) for seed in range(4)}
    assert len({tuple(tokens) for tokens in wanted.values()}) == 4
    # After other requests, with their KV left behind, and in another pipeline.
    busy = table_pipeline(TableEngine(logits, VOCAB), tmp_path, draft_with=draft_with, retained_slots=1)
    for seed in (2, 0, 3, 0, 1, 2):
        busy.generate("abc", seed=9, **{**options, "mode": "plain"})
        assert text(busy, seed) == wanted[seed]


def test_a_missing_seed_is_drawn_and_reported(tmp_path: Path) -> None:
    pipeline = table_pipeline(TableEngine(hashed_logits(VOCAB, sharpness=0.5), VOCAB), tmp_path)
    options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 40, "raw": True}
    first, second = (pipeline.generate("ab", **options) for _ in range(2))
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    assert pipeline.generate("ab", seed=first.seed, **options).token_ids == first.token_ids


def test_logprobs_are_those_of_the_row_that_judged_the_token(tmp_path: Path) -> None:
    logits = hashed_logits(VOCAB)
    pipeline = table_pipeline(TableEngine(logits, VOCAB), tmp_path)
    found = pipeline.generate("abc", mode="speculative", max_new_tokens=30, raw=True, logprobs=VOCAB + 5)
    assert found.logprobs is not None
    tokens = pipeline.encode("abc")
    for token, entry in zip(found.token_ids, found.logprobs, strict=True):
        row = logits("full", tuple(tokens), digest_of(tokens)).astype(np.float64)
        wanted = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert entry.logprob == pytest.approx(wanted[token], abs=1e-6)
        assert [t for t, _ in entry.top] == list(np.argsort(-wanted, kind="stable"))
        assert [lp for _, lp in entry.top] == pytest.approx(np.sort(wanted)[::-1], abs=1e-6)
        tokens.append(token)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.0},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-39},
        {"repetition_penalty": 101},
        {"repetition_penalty": float("inf")},
        {"repetition_penalty": float("nan")},
        {"seed": -1},
        {"seed": 2**64},
    ],
    ids=str,
)
def test_a_sampling_parameter_out_of_range_is_named_with_what_was_wanted(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(RequestError, match=rf"{name} is .*, wanted"):
        GenerationConfig(**bad)
