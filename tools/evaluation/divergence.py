"""Perplexity of every tier on given texts, and how far slim and `routed` are off the full verifier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from via_sd.contract.graphs import FULL
from via_sd.runtime import Pipeline
from via_sd.runtime.decoding.router import Router
from via_sd.runtime.engines.rows import logits_of

ROUTED = "routed"


@dataclass
class TierFigures:
    """Sums over tokens, and what follows from them.

    Attributes:
        tokens: scored tokens.
        negative_log_likelihood: sum of -log p(token), nats.
        kl: sum of KL(full || this), nats.
        same_argmax: tokens for which this and full like the same best.
        from_slim: of `routed`, tokens whose distribution is slim's.
    """

    tokens: int = 0
    negative_log_likelihood: float = 0.0
    kl: float = 0.0
    same_argmax: int = 0
    from_slim: int = 0

    def to_json(self) -> dict[str, Any]:
        """Means per token, and the perplexity."""
        figures = asdict(self)
        means = {name: value / self.tokens for name, value in figures.items() if name != "tokens"}
        means["perplexity"] = float(np.exp(means["negative_log_likelihood"]))
        return {"tokens": self.tokens, **means}


@dataclass
class Divergence:
    """Figures of `full`, of the slim-verifier's tier and of `routed`, by name."""

    figures: dict[str, TierFigures] = field(default_factory=dict)

    def add(self, name: str, full: np.ndarray, other: np.ndarray, tokens: Sequence[int], from_slim: int = 0) -> None:
        """Count rows of log-probabilities, float64 [rows, vocab], and the tokens that followed."""
        each = self.figures.setdefault(name, TierFigures())
        each.tokens += len(tokens)
        each.negative_log_likelihood -= float(other[np.arange(len(tokens)), tokens].sum())
        each.kl += float((np.exp(full) * (full - other)).sum())
        each.same_argmax += int((full.argmax(1) == other.argmax(1)).sum())
        each.from_slim += from_slim

    def to_json(self) -> dict[str, Any]:
        return {name: each.to_json() for name, each in self.figures.items()}


def measure_divergence(pipeline: Pipeline, texts: Iterable[Sequence[int]], router: Router) -> Divergence:
    """Feed every text (token ids, at most the KV buffers' capacity) to full and slim, and compare their rows.

    `routed` is taken as it is without a draft: a token has slim's distribution where `router` says that slim is sure,
    else full's. Both tiers see the text itself before each token, so errors do not add up.
    """
    found = Divergence()
    engine, slim = pipeline.verifier, pipeline.bundle.slim
    for tokens in texts:
        buffers = {tier: engine.new_buffers() for tier in (FULL, slim) if tier is not None}
        for at in range(0, len(tokens) - 1, engine.prefill_chunk):
            block = tokens[at : min(at + engine.prefill_chunk, len(tokens) - 1)]
            following = tokens[at + 1 : at + 1 + len(block)]
            full = _log_softmax(logits_of(buffers[FULL].forward(FULL, block, at, len(block))))
            found.add(FULL, full, full, following)
            if slim is None:
                continue
            rows = buffers[slim].forward(slim, block, at, len(block))
            sure = np.array([router.is_sure(row) for row in rows])
            other = _log_softmax(logits_of(rows))
            found.add(slim, full, other, following, len(following))
            found.add(ROUTED, full, np.where(sure[:, None], other, full), following, int(sure.sum()))
        for each in buffers.values():
            engine.release(each)
    return found


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
