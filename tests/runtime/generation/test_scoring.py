"""Log-probabilities of given texts: those of transformers, of any tier, however the text is fed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.pipelines import WatchedPipeline, table_pipeline
from tests.support.table_engine import TableEngine, digest_of, hashed_logits
from via_sd.errors import RequestError

TEXT = "The thing in the king of the hats, over the ocean. " * 3


def test_full_scores_a_text_as_transformers_does(
    tiny_checkpoint: Path, tiny_pipelines: dict[str, WatchedPipeline]
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pipeline = tiny_pipelines["ngram"]
    found = pipeline.score(TEXT)
    ids = pipeline.encode(TEXT, raw=True)
    assert found.token_ids == ids[1:]
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    with torch.no_grad():
        wanted = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], -1)
    assert found.logprobs == pytest.approx([float(row[t]) for row, t in zip(wanted, ids[1:], strict=True)], abs=1e-3)
    assert found.is_greedy == [int(row.argmax()) == t for row, t in zip(wanted, ids[1:], strict=True)]
    assert found.perplexity == pytest.approx(math.exp(-np.mean(found.logprobs)))
    after = pipeline.score(TEXT[16:], context=TEXT[:16])
    assert after.logprobs == pytest.approx(pipeline.score(ids).logprobs[-len(after.logprobs) :], abs=1e-4)


@pytest.mark.parametrize("tier", ["full", "slim"])
@pytest.mark.parametrize("chunk", [1, 3, 512])
@pytest.mark.parametrize("start", [0, 1, 5, 19])
def test_each_tier_scores_by_its_own_logits(tier: str, chunk: int, start: int, tmp_path: Path) -> None:
    logits = hashed_logits(6)
    pipeline = table_pipeline(TableEngine(logits, 6, prefill_chunk=chunk), tmp_path)
    tokens = [int(t) for t in np.random.default_rng(start).integers(0, 6, 20)]
    found = pipeline.score(tokens[start:], context=tokens[:start], tier=tier)
    wanted = []
    for at in range(max(1, start), 20):
        row = logits(tier, (), digest_of(tokens[:at])).astype(np.float64)
        wanted.append(float(row[tokens[at]] - np.log(np.exp(row).sum())))
    assert found.logprobs == pytest.approx(wanted, abs=1e-5)
    assert found.total == pytest.approx(sum(wanted), abs=1e-4)


def test_scoring_and_decoding_take_turns(tmp_path: Path) -> None:
    pipeline = table_pipeline(TableEngine(hashed_logits(6), 6), tmp_path)
    alone = pipeline.generate("abc", max_new_tokens=20).token_ids
    stream = pipeline.stream("abc", max_new_tokens=20)
    next(stream)
    score = pipeline.score("abcabc")
    for _ in stream:
        pass
    assert stream.completion.token_ids == alone
    assert pipeline.score("abcabc") == score


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("a", {}, "1 tokens leave nothing to score"),
        ("ab", {"tier": "thin"}, "tier 'thin' is not known; this bundle's are full, slim, deep"),
        ([0] * 40, {}, "40 tokens are too many to score at once, wanted 33 or fewer"),
        ([0, 9], {}, "token 9 is not one of this model's, 0 to 5"),
    ],
)
def test_what_cannot_be_scored_is_refused(text: Any, options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=says):
        table_pipeline(TableEngine(hashed_logits(6), 6, 32), tmp_path).score(text, **options)


def test_texts_and_bad_words_with_half_a_surrogate_pair_are_refused(
    tiny_pipelines: dict[str, WatchedPipeline],
) -> None:
    pipeline = tiny_pipelines["ngram"]
    with pytest.raises(RequestError, match="the text holds half a surrogate pair"):
        pipeline.score("a\ud800", context="The")
    with pytest.raises(RequestError, match="a bad word holds half a surrogate pair"):
        pipeline.generate("The", bad_words=("\udcff",), max_new_tokens=2)
    assert pipeline.generate("The", max_new_tokens=2).token_ids
