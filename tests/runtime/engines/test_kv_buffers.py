"""KV in a real engine's buffers: a cached pass of k tokens is k single steps; every position holds what it should."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.pipelines import WatchedPipeline
from tests.support.tiny import MAX_SEQ_LEN
from via_sd.contract.generation_options import for_mode
from via_sd.contract.graphs import FULL
from via_sd.runtime.decoding.cache import SequenceCache
from via_sd.runtime.decoding.passes import complete
from via_sd.runtime.engines.protocol import ReadableKVBuffers
from via_sd.runtime.engines.rows import logits_of

#: Largest difference float32 rounding makes, as a share of the largest value compared.
TOLERANCE = 2e-5
#: (tier, tokens to append before its pass) or ("rollback", positions to take back).
Step = tuple[str, int]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(("full", "slim", "deep")), st.integers(0, 17)),
        st.tuples(st.just("rollback"), st.integers(1, 20)),
    ),
    min_size=1,
    max_size=12,
)


def contents_of(kv: ReadableKVBuffers) -> np.ndarray:
    """What the buffers hold, [layers, 2, heads, max_seq_len, head_dim]."""
    layers = kv._engine.kv["num_layers"]  # type: ignore[attr-defined]
    return np.stack([kv.keys_values(layer) for layer in range(layers)])


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).max()


@given(start=st.one_of(st.integers(1, MAX_SEQ_LEN), st.integers(MAX_SEQ_LEN - 30, MAX_SEQ_LEN)), steps=STEPS)
@settings(max_examples=150, derandomize=True, deadline=None)
def check_against_single_steps(pipeline: WatchedPipeline, start: int, steps: list[Step]) -> None:
    rng = np.random.default_rng(start)
    blocks, singles = (SequenceCache(pipeline.verifier.new_buffers(), pipeline.verifier) for _ in range(2))
    tokens = rng.integers(0, 256, start).tolist()
    complete(blocks.forward(FULL, tokens, 1))
    for end in range(1, len(tokens) + 1):
        complete(singles.forward(FULL, tokens[:end], 1))
    for action, count in steps:
        if action == "rollback":
            del tokens[max(1, len(tokens) - count) :]
            for cache in (blocks, singles):
                cache.truncate(len(tokens))
            continue
        tokens += rng.integers(0, 256, min(count, MAX_SEQ_LEN - len(tokens))).tolist()
        missing = len(tokens) - blocks.lengths[action]
        if missing == 0:
            continue
        found = logits_of(complete(blocks.forward(action, tokens, missing)))
        ends = range(len(tokens) - missing + 1, len(tokens) + 1)
        assert_close(
            found, np.concatenate([logits_of(complete(singles.forward(action, tokens[:end], 1))) for end in ends])
        )


def test_a_cached_pass_of_any_tier_equals_single_steps_up_to_the_last_position(
    tiny_pipelines: dict[str, WatchedPipeline],
) -> None:
    check_against_single_steps(tiny_pipelines["mask"])


@pytest.mark.parametrize("tier", ["full", "slim", "deep"])
@pytest.mark.parametrize("block", [1, 2, 7, 16, 64])
def test_the_last_position_of_the_buffer_is_as_good_as_any(
    tier: str, block: int, tiny_pipelines: dict[str, WatchedPipeline]
) -> None:
    engine = tiny_pipelines["mask"].verifier
    tokens = np.random.default_rng(block).integers(0, 256, MAX_SEQ_LEN).tolist()
    cached = engine.new_buffers()
    cached.forward(tier, tokens[:-block], 0, 1)
    found = logits_of(cached.forward(tier, tokens[-block:], MAX_SEQ_LEN - block, block))
    assert_close(found, logits_of(engine.new_buffers().forward(tier, tokens, 0, block)))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("mode", ["plain", "speculative", "cascade", "routed"])
@pytest.mark.parametrize("kind", ["ngram", "mask", "model"])
def test_after_every_round_the_buffers_hold_what_fresh_passes_write(
    kind: str, mode: str, temperature: float, tiny_pipelines: dict[str, WatchedPipeline]
) -> None:
    pipeline = tiny_pipelines[kind]
    options = for_mode({"mode": mode, "temperature": temperature, "seed": 5, "alpha2": 0.8, "max_lag": 24})
    rounds = 0
    for prompt in ("Hello there", "x" * 215, "the in of the"):
        stream = pipeline.stream(prompt, raw=True, ignore_eos=True, max_new_tokens=70, **options)
        tokens = pipeline.encode(prompt, raw=True)
        for chunk in stream:
            tokens += chunk.token_ids
            caches = pipeline.current
            _assert_written(pipeline, caches.verifier, tokens)
            if caches.drafter is not None:
                _assert_full_kv(pipeline.drafter, caches.drafter, tokens)  # type: ignore[arg-type]
            rounds += 1
    assert rounds > 30


def _assert_written(pipeline: WatchedPipeline, cache: SequenceCache, tokens: Sequence[int]) -> None:
    """Full's KV is that of a fresh prefill; behind it slim's, in the layers it keeps, is that of a fresh slim pass."""
    lengths = [cache.lengths[tier] for tier in pipeline.verifier.tiers]
    assert lengths == sorted(lengths)
    assert lengths[-1] <= len(tokens) - 1, "the last token was fed to nobody"
    fresh = _assert_full_kv(pipeline.verifier, cache, tokens)
    slim_length = cache.lengths["slim"]
    if slim_length > lengths[0]:
        fresh.forward("slim", tokens[lengths[0] : slim_length], lengths[0], 1)
        kept = np.flatnonzero(pipeline.bundle.masks["slim"].keep_attention)
        region = (kept, slice(None), slice(None), slice(lengths[0], slim_length))
        assert_close(contents_of(cache._buffers)[region], contents_of(fresh)[region])


def _assert_full_kv(engine: Any, cache: SequenceCache, tokens: Sequence[int]) -> ReadableKVBuffers:
    length = cache.lengths[FULL]
    fresh: ReadableKVBuffers = engine.new_buffers()
    if length == 0:  # plain decoding never asks a drafter
        return fresh
    fresh.forward(FULL, tokens[:length], 0, 1)
    assert_close(contents_of(cache._buffers)[..., :length, :], contents_of(fresh)[..., :length, :])
    return fresh
