"""Perplexity and divergence of tiers on given texts, against brute force."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.support.pipelines import table_pipeline
from tests.support.table_engine import TableEngine, digest_of, hashed_logits
from via_sd.runtime.decoding.router import Gates
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
