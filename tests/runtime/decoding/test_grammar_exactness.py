"""Answers that follow a grammar, in every mode and with every drafter: never violated, and as exact as without one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.support.distributions import Tally
from tests.support.pipelines import ScriptedDrafter, WatchedPipeline, table_pipeline
from tests.support.table_engine import TableEngine, hashed_logits, markov_logits
from tests.support.tiny import write_tokenizer
from via_sd.errors import RequestError
from via_sd.runtime import GenerationConfig
from via_sd.runtime.generation.grammar import GrammarCompiler

pytest.importorskip("llguidance", reason="needs the grammar extra")

MODES = ("plain", "speculative", "cascade", "routed")
DRAFTERS = ("ngram", "mask", "model")
#: A false alarm in one case in ten thousand.
ALPHA = 1e-4
CHOICES = ("the thing", "thin", "in the", "on of the king", "a", "er")
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["river", "sea", "the ocean"]},
        "depth": {"type": "integer", "minimum": 0, "maximum": 999},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["kind", "depth", "names"],
    "additionalProperties": False,
}
PENALTIES: dict[str, Any] = {"presence_penalty": 0.8, "frequency_penalty": 0.6, "logit_bias": {256: 1.0, 64: -1.0}}
LARK = 'start: "(" start ")" | LETTERS\nLETTERS: /[a-c]{1,3}/'


def fits_schema(text: str) -> bool:
    answer = json.loads(text)
    return (
        set(answer) == {"kind", "depth", "names"}
        and answer["kind"] in ("river", "sea", "the ocean")
        and type(answer["depth"]) is int
        and 0 <= answer["depth"] <= 999
        and len(answer["names"]) <= 2
        and all(isinstance(name, str) and len(name) <= 4 for name in answer["names"])
    )


def fits_lark(text: str) -> bool:
    found = re.fullmatch(r"(\(*)[a-c]{1,3}(\)*)", text)
    return found is not None and len(found[1]) == len(found[2])


GRAMMARS: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "json schema": ({"json_schema": SCHEMA}, fits_schema),
    "regex": ({"regex": r"(the|a) [a-z]{2,5}(, [0-9]{1,3}){0,2}\."}, re.compile(
        r"(the|a) [a-z]{2,5}(, [0-9]{1,3}){0,2}\.").fullmatch),
    "lark": ({"grammar": LARK}, fits_lark),
    "gbnf": ({"grammar": 'root ::= "[" item ("," item)? "]"\nitem ::= "the" | "in" | "of"'}, re.compile(
        r"\[(the|in|of)(,(the|in|of))?\]").fullmatch),
    "choices": ({"choices": CHOICES}, CHOICES.__contains__),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def build(kind: str, directory: Path, tokenizer: Tokenizer, logits: Any = None) -> WatchedPipeline:
    vocab = tokenizer.get_vocab_size()
    logits = logits or hashed_logits(vocab, sharpness=3.0, slim=0.3, deep=0.3)
    model = TableEngine(lambda tier, *at: logits("deep", *at), vocab, 256, ("full",))
    return table_pipeline(
        TableEngine(logits, vocab, 256),
        directory,
        draft_with={"mask": "mask", "model": model}.get(kind, "ngram"),
        tokenizer=tokenizer,
        eos=[vocab - 1, vocab - 3],
    )


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_no_answer_violates_its_grammar(name: str, kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    given, fits = GRAMMARS[name]
    pipeline = build(kind, tmp_path, tokenizer)
    complete = 0
    for seed in range(34):
        for mode in MODES:
            found = pipeline.generate(
                "the in", mode=mode, seed=seed, temperature=1.0, gamma=(None, 1, 5)[seed % 3], max_new_tokens=120,
                **given,
            )  # fmt: skip
            if found.finish_reason == "stop":
                assert fits(found.text), found.text
                complete += 1
    assert complete > 100


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("mode", ["speculative", "cascade"])
def test_greedy_answers_are_those_of_plain_with_the_same_grammar(
    mode: str, kind: str, name: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    given, _ = GRAMMARS[name]
    pipeline = build(kind, tmp_path, tokenizer)
    for prompt in ("a", "the the the", "in {"):
        options: dict[str, Any] = {
            "max_new_tokens": 60,
            "frequency_penalty": 0.5,
            "logit_bias": {64: 2, 256: -2},
            **given,
        }
        plain = pipeline.generate(prompt, mode="plain", **options)
        found = pipeline.generate(prompt, mode=mode, **options)
        assert (found.token_ids, found.finish_reason) == (plain.token_ids, plain.finish_reason)


@pytest.mark.parametrize("rules", [{}, PENALTIES], ids=["grammar alone", "with penalties and biases"])
@pytest.mark.parametrize(("mode", "kind"), [("plain", "ngram"), ("speculative", "model"), ("cascade", "mask")])
def test_answers_follow_the_probabilities_that_the_grammar_leaves(
    mode: str, kind: str, rules: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    vocab = tokenizer.get_vocab_size()
    logits = markov_logits(vocab, sharpness=1.0, slim=0.5, deep=0.8)
    pipeline, tally = build(kind, tmp_path, tokenizer, logits), Tally(vocab)
    ends = pipeline.eos_token_ids
    texts = [tokenizer.decode([token], skip_special_tokens=True) for token in range(vocab)]
    compiler = GrammarCompiler(tokenizer, ends, vocab)
    known: dict[tuple[int, ...], list[int]] = {}

    def may_follow(token: int, text: str) -> bool:
        if token in ends:
            return text in CHOICES
        return texts[token] != "" and any(choice.startswith(text + texts[token]) for choice in CHOICES)

    def allowed(answer: tuple[int, ...]) -> list[int]:
        """By a matcher that never went back; where it forces a text, it allows one way to divide that into tokens."""
        if answer not in known:
            constraint = compiler.constraint(GenerationConfig(choices=CHOICES), 0)
            assert constraint is not None
            found = np.flatnonzero(constraint(np.zeros(vocab, np.float32), answer, ()) == 0).tolist()
            text = tokenizer.decode(answer, skip_special_tokens=True)
            wanted = [token for token in range(vocab) if may_follow(token, text)]
            assert found == wanted or (len(found) == 1 and found[0] in wanted)
            known[answer] = found
        return known[answer]

    def change(token: int, answer: tuple[int, ...]) -> float:
        """What the rules add to a logit, token by token."""
        if not rules:
            return 0.0
        count = answer.count(token)
        penalty = rules["presence_penalty"] * (count > 0) + rules["frequency_penalty"] * count
        return float(rules["logit_bias"].get(token, 0.0) - penalty)

    for seed in range(500):
        found = pipeline.generate(
            "b", mode=mode, seed=seed, gamma=(None, 2, 5)[seed % 3], temperature=1.0, choices=CHOICES,
            max_new_tokens=20, **rules,
        )  # fmt: skip
        assert found.finish_reason == "stop"
        for at, token in enumerate(found.token_ids):
            answer = tuple(found.token_ids[:at])
            row = logits("full", (answer[-1] if answer else pipeline.encode("b")[-1],), 0)
            weights = {each: math.exp(row[each] + change(each, answer)) for each in allowed(answer)}
            total = sum(weights.values())
            tally.add(answer, token, [weights.get(each, 0.0) / total for each in range(vocab)])
    assert tally.impossible == 0
    assert tally.p_value() > ALPHA
    assert tally.p_value(shift=0.15) < ALPHA, "the sample is too small to see an error of 15 %"


@pytest.mark.parametrize("mode", ["speculative", "cascade"])
def test_forced_text_is_drafted_without_a_drafter(mode: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    forced = "of the king on the thing in a hat, of the king"
    vocab = tokenizer.get_vocab_size()
    pipeline = build("ngram", tmp_path, tokenizer, lambda *_: hashed_logits(vocab, sharpness=0)("full", (), 1))
    pipeline.replacement = lambda *_: ScriptedDrafter()
    found = pipeline.generate("b", mode=mode, choices=[forced])
    assert found.text == forced
    assert found.stats.drafted_tokens > 0.5 * len(found.token_ids)
    assert found.stats.accepted_tokens == found.stats.drafted_tokens


def test_a_draft_that_the_grammar_forbids_is_never_put_to_a_verifier(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pipeline = build("ngram", tmp_path, tokenizer)
    bad = tokenizer.encode("Z!").ids
    pipeline.replacement = lambda *_: ScriptedDrafter(*[bad] * 50)
    for mode in MODES:
        pipeline.generate("b", mode=mode, regex="[a-z]{30}", max_new_tokens=20)
    fed = [token for buffers in pipeline.verifier.buffers for call in buffers.calls for token in call.tokens]  # type: ignore[attr-defined]
    assert bad[0] not in fed


@pytest.mark.parametrize("mode", MODES)
def test_a_complete_grammar_ends_an_answer_before_its_minimum_length(
    mode: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    pipeline = build("mask", tmp_path, tokenizer)
    found = pipeline.generate("b", mode=mode, regex="a{2}b*c", min_new_tokens=60, max_new_tokens=200)
    assert found.finish_reason == "stop"
    assert re.fullmatch("a{2}b*c", found.text)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"regex": "("}, "regex cannot be"),
        ({"json_schema": "{"}, "json_schema cannot be read"),
        ({"json_schema": "[]"}, "json_schema is '\\[\\]', wanted a JSON object"),
        ({"grammar": "start: nothing"}, "grammar cannot be"),
        ({"choices": []}, "choices is empty"),
        ({"regex": "a", "choices": ["a"]}, "regex and choices exclude each other"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos would go on behind the end"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused(
    given: dict[str, Any], says: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=says):
        build("ngram", tmp_path, tokenizer).generate("b", **given)
