"""The parts of a text by tier: together they are the text, and each is that of its tokens."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.support.pipelines import WatchedPipeline, table_pipeline
from tests.support.table_engine import TableEngine, hashed_logits

MODES = ("plain", "speculative", "cascade", "routed")


@pytest.mark.parametrize("mode", MODES)
def test_where_every_token_is_a_letter_each_letter_has_the_tier_of_its_token(mode: str, tmp_path: Path) -> None:
    pipeline = table_pipeline(TableEngine(hashed_logits(6, slim=0.3), 6), tmp_path)
    stream = pipeline.stream("abcabc", mode=mode, max_new_tokens=60, temperature=1.0, seed=3, echo=True)
    chunks = list(stream)
    found = stream.completion
    letters = [(letter, tier) for text, tier in found.pieces for letter in text]
    assert letters == [*((letter, "prompt") for letter in "abcabc"), *zip(found.text[6:], found.tiers, strict=True)]
    assert [tier for tier, _ in groupby(tier for _, tier in found.pieces)] == [tier for _, tier in found.pieces]
    assert ["".join(text for text, _ in chunk.pieces) for chunk in chunks] == [chunk.text for chunk in chunks]


@pytest.mark.parametrize("kind", ["ngram", "mask", "model"])
@pytest.mark.parametrize(
    "options",
    [{}, {"stop": ["e", "th"]}, {"skip_special_tokens": False}, {"ignore_eos": True}, {"stop": ["<|im_end|>"]}],
    ids=str,
)
def test_pieces_are_the_text_whatever_ends_or_hides_it(
    options: dict[str, Any], kind: str, tiny_pipelines: dict[str, WatchedPipeline]
) -> None:
    for seed in range(6):
        stream = tiny_pipelines[kind].stream(
            "the the", mode=MODES[seed % 4], seed=seed, temperature=1.5, max_new_tokens=60, **options
        )
        chunks = list(stream)
        found = stream.completion
        assert "".join(text for text, _ in found.pieces) == found.text
        assert ["".join(text for text, _ in chunk.pieces) for chunk in chunks] == [chunk.text for chunk in chunks]
        assert {tier for _, tier in found.pieces} <= set(found.tiers)
