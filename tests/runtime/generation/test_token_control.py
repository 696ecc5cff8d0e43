"""What a request says about its tokens and texts: stops, special tokens, echo, several answers, the model's rules."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from tests.support.pipelines import WatchedPipeline, letters_tokenizer, table_pipeline
from tests.support.table_engine import TableEngine, hashed_logits, scripted_logits
from via_sd.errors import RequestError

MODES = ("plain", "speculative", "cascade", "routed")
VOCAB = 10
TURN, EOS = 8, 9  # special tokens <turn> and <eos>


def build(directory: Path, rules: dict[str, Any] | None = None, **options: Any) -> WatchedPipeline:
    """A model that counts on from the last token: a b c d e f g h <turn> <eos>."""
    tokenizer = letters_tokenizer(8)
    tokenizer.add_special_tokens([AddedToken("<turn>", special=True), AddedToken("<eos>", special=True)])
    engine = TableEngine(scripted_logits(VOCAB, {}), VOCAB)
    return table_pipeline(engine, directory, tokenizer=tokenizer, eos=[EOS], settings=rules or {}, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("options", "text", "reason", "tokens"),
    [
        ({}, "bcdefgh", "stop", 9),
        ({"skip_special_tokens": False}, "bcdefgh<turn><eos>", "stop", 9),
        ({"stop_token_ids": [4]}, "bcde", "stop", 4),
        ({"stop_token_ids": [TURN]}, "bcdefgh", "stop", 8),
        ({"stop": ["<turn>"]}, "bcdefgh", "stop", 8),
        ({"stop": ["h<turn>"]}, "bcdefg", "stop", 8),
        ({"stop": ["<turn><"]}, "bcdefgh", "stop", 9),
        ({"stop": ["x<turn>"]}, "bcdefgh", "stop", 9),
        ({"stop": ["gh"], "skip_special_tokens": False}, "bcdef", "stop", 7),
        ({"echo": True, "stop": ["e"]}, "abcd", "stop", 4),
        ({"stop": ["c"], "min_new_tokens": 5}, "bcdefgh", "stop", 9),
        ({"min_new_tokens": 12, "max_new_tokens": 15}, None, None, None),
    ],
)
def test_where_a_text_ends_and_what_of_it_shows(
    mode: str, options: dict[str, Any], text: str | None, reason: str | None, tokens: int | None, tmp_path: Path
) -> None:
    pipeline = build(tmp_path)
    stream = pipeline.stream("a", mode=mode, **options)
    streamed = "".join(chunk.text for chunk in stream)
    found = stream.completion
    assert streamed == found.text
    if text is None:
        assert EOS not in found.token_ids[:12]
        assert len(found.token_ids) >= 12
    else:
        assert (found.text, found.finish_reason, len(found.token_ids)) == (text, reason, tokens)


def test_the_models_rules_hold_unless_a_request_says_otherwise(tmp_path: Path) -> None:
    rules = {"suppress_tokens": [2], "bad_words_ids": [[4, 5]], "begin_suppress_tokens": [1], "min_new_tokens": 3}
    pipeline = build(tmp_path, {**rules, "temperature": 0.6, "top_p": 0.9})
    assert pipeline.sampling_defaults == {"temperature": 0.6, "top_p": 0.9}
    assert build(tmp_path / "other").generate("a", stop_token_ids=[3]).text == "bcd"
    found = pipeline.generate("a", max_new_tokens=20)
    assert found.token_ids[0] != 1
    assert 2 not in found.token_ids
    assert pipeline.generate("b", suppress_tokens=[], stop_token_ids=[3], min_new_tokens=0).text == "cd"
    assert (4, 5) not in list(itertools.pairwise(found.token_ids))
    assert pipeline.generate("e", bad_words=[], stop_token_ids=[6], min_new_tokens=0).text == "fg"


@pytest.mark.parametrize("name", ["suppress_tokens", "stop_token_ids", "logit_bias"])
def test_a_token_that_the_model_does_not_have_is_refused(name: str, tmp_path: Path) -> None:
    value: Any = {99: 1.0} if name == "logit_bias" else [99]
    with pytest.raises(RequestError, match=f"{name} has the token 99; this model's are 0 to 9"):
        build(tmp_path).generate("a", **{name: value})


@pytest.mark.parametrize("mode", MODES)
def test_several_answers_are_those_of_their_seeds_over_one_prefill(mode: str, tmp_path: Path) -> None:
    pipeline = table_pipeline(TableEngine(hashed_logits(8), 8), tmp_path)
    options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 20, "mode": mode}
    found = pipeline.generate_n("abcdefgh", 3, seed=5, **options)
    assert [each.seed for each in found] == [5, 6, 7]
    assert len({tuple(each.token_ids) for each in found}) == 3
    assert [each.stats.reused_prefix_tokens for each in found] == [0, 6, 6]
    for each in found:
        alone = table_pipeline(TableEngine(hashed_logits(8), 8), tmp_path).generate(
            "abcdefgh", seed=each.seed, **options
        )
        assert alone.token_ids == each.token_ids
    with pytest.raises(RequestError, match="n is 0, wanted 1 or more"):
        pipeline.generate_n("a", 0)
