"""At temperature > 0 exact modes emit the full verifier's processed distribution, whoever drafts; `routed` is off it.

Each case draws about 8,000 tokens from a Markov chain over six tokens, so that every conditional distribution is
sampled often. The same data has to reject distributions that are 3 % away, and broken acceptance tests have to be
found out.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import via_sd.runtime.decoding.verification
from tests.support.distributions import Tally, brute_force_probabilities
from tests.support.pipelines import AdversarialDrafter, WatchedPipeline, table_pipeline
from tests.support.table_engine import LogitsTable, TableEngine, markov_logits
from via_sd.runtime import GenerationConfig
from via_sd.runtime.decoding.random_stream import Purpose, RandomStream
from via_sd.runtime.decoding.verification import acceptance as real_acceptance

VOCAB = 6
CAPACITY = 208
TEXTS = 64
#: A false alarm in one case in ten thousand; seeds are fixed, so it stays the same until the algorithm changes.
ALPHA = 1e-4
LOGITS: LogitsTable = markov_logits(VOCAB, sharpness=0.9, slim=0.5, deep=0.8)
PROCESSING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.2, "top_p": 0.75},
    "min_p": {"temperature": 1.0, "min_p": 0.3},
    "penalty": {"temperature": 0.7, "repetition_penalty": 1.6},
    "all": {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3},
}
DRAFTERS = ("ngram", "mask", "model", "random", "point")
CASES = [
    ("plain", "ngram", "all"),
    *((mode, kind, "all") for mode in ("speculative", "cascade") for kind in DRAFTERS),
    *(("cascade", "mask", processing) for processing in PROCESSING if processing != "all"),
    ("speculative", "model", "temperature"),
    ("speculative", "random", "top_k"),
    ("speculative", "ngram", "penalty"),
]
EVERY_OTHER_CASE = [
    case
    for case in itertools.product(("plain", "speculative", "cascade"), DRAFTERS, PROCESSING)
    if case not in CASES and (case[0] != "plain" or case[1] == "ngram")
]


def build(kind: str, directory: Path) -> WatchedPipeline:
    """A pipeline whose drafter is `kind`: one of the bundle's, or draws from random distributions or point masses."""
    engine = TableEngine(LOGITS, VOCAB, CAPACITY)
    model = TableEngine(lambda tier, *at: LOGITS("deep", *at), VOCAB, CAPACITY, ("full",))
    pipeline = table_pipeline(engine, directory, draft_with={"mask": "mask", "model": model}.get(kind, "ngram"))
    if kind in ("random", "point"):
        seeds = itertools.count()
        pipeline.replacement = lambda *_: AdversarialDrafter(
            VOCAB, lambda sequence: sequence[-1], next(seeds), sampled=kind == "random"
        )
    return pipeline


def full_probabilities(tokens: Sequence[int], params: GenerationConfig) -> tuple[float, ...]:
    """Brute force: what full would emit after `tokens`."""
    return _full_probabilities(tokens[-1], frozenset(tokens) if params.repetition_penalty != 1 else frozenset(), params)


@functools.cache
def _full_probabilities(last: int, seen: frozenset[int], params: GenerationConfig) -> tuple[float, ...]:
    return tuple(brute_force_probabilities(LOGITS("full", (last,), 0).tolist(), params, seen))


def sample(
    pipeline: WatchedPipeline, mode: str, processing: dict[str, Any], texts: int = TEXTS, **options: Any
) -> Tally:
    """Generate `texts` of about 200 tokens and count every token against the distribution brute force gives it."""
    params = GenerationConfig(**processing)
    tally = Tally(VOCAB)
    for seed in range(texts):
        # Adaptive and fixed block lengths in turn; the prompt gives an n-gram drafter something to copy.
        gamma = (None, 1, 4, 7)[seed % 4]
        found = pipeline.generate(
            "abcdefabc",
            mode=mode,
            seed=seed,
            gamma=gamma,
            max_new_tokens=200 - seed % 7,
            raw=True,
            **processing,
            **options,
        )
        tokens = [*pipeline.encode("abcdefabc"), *found.token_ids]
        for at in range(found.prompt_tokens, len(tokens)):
            tally.add(tokens[at - 1], tokens[at], full_probabilities(tokens[:at], params))
    return tally


@pytest.mark.parametrize(
    ("mode", "kind", "processing"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in EVERY_OTHER_CASE)],
)
def test_an_exact_mode_emits_the_processed_probabilities_of_full(
    mode: str, kind: str, processing: str, tmp_path: Path
) -> None:
    pipeline = build(kind, tmp_path)
    tally = sample(pipeline, mode, PROCESSING[processing])
    assert tally.impossible == 0
    assert tally.p_value() > ALPHA
    assert tally.p_value(shift=0.03) < ALPHA, "the sample is too small to see an error of 3 %"


@pytest.mark.parametrize("mode", ["speculative", "cascade"])
def test_a_penalty_counts_the_tokens_of_the_block_itself(mode: str, tmp_path: Path) -> None:
    # Short texts, in which most tokens are new and a block repeats what it has just brought in.
    options: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 2.5}
    params, tally, pipeline = GenerationConfig(**options), Tally(VOCAB), build("mask", tmp_path)
    for seed in range(1200):
        found = pipeline.generate("a", mode=mode, seed=seed, gamma=6, max_new_tokens=8, raw=True, **options)
        tokens = [0, *found.token_ids]
        for at in range(1, len(tokens)):
            tally.add(tokens[at - 1], tokens[at], full_probabilities(tokens[:at], params))
    assert tally.p_value() > ALPHA


@pytest.mark.parametrize("mode", ["speculative", "cascade"])
def test_nothing_is_rejected_where_the_lower_tiers_have_the_probabilities_of_full(mode: str, tmp_path: Path) -> None:
    # Any acceptance test that keeps the distribution of full would do; the right one keeps as much as can be kept.
    logits = markov_logits(VOCAB, sharpness=0.9, slim=0.0)
    engine = TableEngine(lambda tier, *at: logits("full", *at), VOCAB, CAPACITY)
    pipeline = table_pipeline(engine, tmp_path, draft_with="mask")
    for seed in range(10):
        stream = pipeline.stream("abc", mode=mode, seed=seed, gamma=4, temperature=1.0, max_new_tokens=100, raw=True)
        lengths = [len(chunk.token_ids) for chunk in stream]
        assert stream.completion.stats.rejection_rate == 0
        if mode == "cascade":
            assert min(lengths[1:-1]) > 2


@pytest.mark.parametrize(("mode", "kind"), [("plain", "ngram"), ("speculative", "model"), ("cascade", "mask")])
def test_the_first_tokens_of_a_text_follow_the_joint_probabilities(mode: str, kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"temperature": 1.1, "top_k": 4, "repetition_penalty": 1.2}
    params = GenerationConfig(**options)
    pipeline = build(kind, tmp_path)
    prompt = pipeline.encode("abcd")
    joint = {(): 1.0}
    for _ in range(3):
        joint = {
            (*head, token): mass * p
            for head, mass in joint.items()
            for token, p in enumerate(full_probabilities([*prompt, *head], params))
        }
    texts = list(joint)
    index = {text: i for i, text in enumerate(texts)}
    tally = Tally(len(texts))
    for seed in range(3000):
        found = pipeline.generate(
            "abcd", mode=mode, seed=seed, gamma=1 + seed % 3, max_new_tokens=3, raw=True, **options
        )
        tally.add("text", index[tuple(found.token_ids)], list(joint.values()))
    assert tally.impossible == 0
    assert tally.p_value() > ALPHA


real_uniform = RandomStream.uniform
BROKEN: dict[str, tuple[str, Callable[..., Any]]] = {
    "a rejected token is replaced from the whole distribution": ("residual", lambda target, proposal, token: target),
    "drafts are accepted a little too often": (
        "acceptance",
        lambda target, proposal, token: min(1.0, 1.15 * real_acceptance(target, proposal, token)),
    ),
    "a drawn draft is tested as if it had been certain": (
        "acceptance",
        lambda target, proposal, token: real_acceptance(target, None, token),
    ),
    "the test and the token behind it share a random number": (
        "uniform",
        lambda stream, position, purpose: real_uniform(stream, position, Purpose.FULL_TEST),
    ),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("mode", ["speculative", "cascade"])
def test_a_broken_acceptance_test_is_found_out(
    mode: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, broken = BROKEN[what]
    owner = RandomStream if name == "uniform" else via_sd.runtime.decoding.verification
    monkeypatch.setattr(owner, name, broken)
    assert sample(build("mask", tmp_path), mode, PROCESSING["all"], texts=25).p_value() < ALPHA


@pytest.mark.parametrize(
    ("kind", "alpha1", "alpha2", "distance"),
    [("ngram", 0.5, 0.7, 0.21), ("mask", 0.5, 0.7, 0.15), ("ngram", 0.8, 0.9, 0.34), ("mask", 0.8, 0.9, 0.24)],
)
def test_routed_is_off_the_probabilities_of_full_the_further_its_gates_open(
    kind: str, alpha1: float, alpha2: float, distance: float, tmp_path: Path
) -> None:
    """Total variation distances as they were measured, which no sampling error explains."""
    options: dict[str, Any] = {"alpha1": alpha1, "alpha2": alpha2, "router": "paper"}
    tally = sample(build(kind, tmp_path), "routed", PROCESSING["temperature"], 30, **options)
    assert tally.p_value() < ALPHA
    assert tally.total_variation() == pytest.approx(distance, abs=0.03)


@pytest.mark.parametrize("kind", ["ngram", "mask"])
def test_routed_is_exact_where_slim_is_never_sure_enough(kind: str, tmp_path: Path) -> None:
    """The likeliest token of every row of this chain has less than 0.7, what the paper's outer gate asks for."""
    options: dict[str, Any] = {"alpha1": 0.5, "alpha2": 0.3, "router": "paper"}
    tally = sample(build(kind, tmp_path), "routed", PROCESSING["temperature"], 30, **options)
    assert tally.p_value() > ALPHA
    assert tally.total_variation() < 0.05


def test_routed_that_never_trusts_slim_is_exact(tmp_path: Path) -> None:
    tally = sample(build("mask", tmp_path), "routed", PROCESSING["all"], alpha2=0.0, router="paper")
    assert tally.p_value() > ALPHA
