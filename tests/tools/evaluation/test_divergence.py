"""Perplexity and divergence of tiers on given texts, against brute force and through the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.support.pipelines import table_pipeline
from tests.support.table_engine import TableEngine, digest_of, hashed_logits
from via_sd.runtime import Pipeline
from via_sd.runtime.decoding.router import Gates
from via_sd.tools.commands.main import app
from via_sd.tools.evaluation.divergence import measure_divergence


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.float64)
    result: np.ndarray = exact - np.log(np.exp(exact).sum())
    return result


@pytest.mark.parametrize("chunk", [3, 512])
def test_the_figures_are_those_of_brute_force(chunk: int, tmp_path: Path) -> None:
    logits = hashed_logits(6)
    pipeline = table_pipeline(TableEngine(logits, 6, prefill_chunk=chunk), tmp_path)
    texts = [[int(t) for t in np.random.default_rng(seed).integers(0, 6, 12)] for seed in range(3)]
    gates = Gates(alpha2=0.3)
    found = measure_divergence(pipeline, texts, gates).to_json()
    sums = {name: {"negative_log_likelihood": 0.0, "kl": 0.0, "same_argmax": 0, "from_slim": 0} for name in found}
    for tokens in texts:
        for at in range(1, len(tokens)):
            full, slim = (log_probabilities(logits(tier, (), digest_of(tokens[:at]))) for tier in ("full", "slim"))
            sure = math.exp(slim.max()) >= 0.7
            for name, row, mine in (
                ("full", full, 0),
                ("slim", slim, 1),
                ("routed", slim if sure else full, int(sure)),
            ):
                sums[name]["negative_log_likelihood"] -= row[tokens[at]]
                sums[name]["kl"] += float((np.exp(full) * (full - row)).sum())
                sums[name]["same_argmax"] += int(full.argmax() == row.argmax())
                sums[name]["from_slim"] += mine
    assert set(found) == {"full", "slim", "routed"}
    assert 0 < sums["routed"]["from_slim"] < 33
    for name, each in sums.items():
        assert found[name]["tokens"] == 33
        for key, total in each.items():
            assert found[name][key] == pytest.approx(total / 33, abs=1e-5)
        assert found[name]["perplexity"] == pytest.approx(math.exp(each["negative_log_likelihood"] / 33), rel=1e-4)


def test_score_prints_every_tier_and_scores_each_token_once(tiny_bundle: Path, tmp_path: Path) -> None:
    text = "The thing in the king of the hats, over the ocean. " * 4
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": text}) + "\n\n", encoding="utf-8")
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    arguments = ["score", str(tiny_bundle), "--threads", "1", "--texts"]
    whole = json.loads(CliRunner().invoke(app, [*arguments, str(tmp_path / "texts.jsonl"), "--json"]).stdout)
    pipeline = Pipeline.load(tiny_bundle, threads=1)
    wanted = pipeline.score(pipeline.tokenizer.encode(text).ids)
    assert whole["full"]["perplexity"] == pytest.approx(wanted.perplexity, rel=1e-4)
    assert (whole["full"]["kl"], whole["full"]["same_argmax"]) == (0, 1)
    assert whole["slim"]["kl"] > whole["routed"]["kl"] >= 0
    command = [*arguments, str(tmp_path / "text.txt"), "--window", "16"]
    assert json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["full"]["tokens"] == len(wanted.logprobs)
    table = CliRunner().invoke(app, command).stdout
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
    done = CliRunner().invoke(app, ["score", str(tiny_bundle), "--texts", str(tmp_path / "t.jsonl")])
    assert done.exit_code == 2
    assert says in done.stderr
