"""`score`: figures of every tier on texts from a file, and one message for a file without any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command_line import invoke, refused
from via_sd.runtime import Pipeline


def test_score_prints_every_tier_and_scores_each_token_once(tiny_bundle: Path, tmp_path: Path) -> None:
    text = "The thing in the king of the hats, over the ocean. " * 4
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": text}) + "\n\n", encoding="utf-8")
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    arguments = ("score", tiny_bundle, "--threads", 1, "--texts")
    whole = json.loads(invoke(*arguments, tmp_path / "texts.jsonl", "--json").stdout)
    pipeline = Pipeline.load(tiny_bundle, threads=1)
    wanted = pipeline.score(pipeline.tokenizer.encode(text).ids)
    assert whole["full"]["perplexity"] == pytest.approx(wanted.perplexity, rel=1e-4)
    assert (whole["full"]["kl"], whole["full"]["same_argmax"]) == (0, 1)
    assert whole["slim"]["kl"] > whole["routed"]["kl"] >= 0
    command = (*arguments, tmp_path / "text.txt", "--window", 16)
    assert json.loads(invoke(*command, "--json").stdout)["full"]["tokens"] == len(wanted.logprobs)
    table = invoke(*command).stdout
    assert all(word in table for word in ("perplexity", "slim", "routed", f"{len(wanted.logprobs)} tokens"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read texts"),
        ("x", "line 1 is not JSON"),
        ("[]", 'wanted {"text":'),
        ('{"text": ""}', "no text of two"),
    ],
)
def test_a_file_without_texts_is_refused(content: str | None, says: str, tiny_bundle: Path, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "t.jsonl").write_text(content, encoding="utf-8")
    refused(invoke("score", tiny_bundle, "--texts", tmp_path / "t.jsonl"), says)
