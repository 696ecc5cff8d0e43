"""Log-probabilities of given text under one tier, which is what evaluation asks of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from via_sd.runtime.decoding.passes import Passes, PassRequest
from via_sd.runtime.engines.protocol import Block, Engine


@dataclass(frozen=True)
class Score:
    """What a tier makes of a given text.

    Attributes:
        token_ids: the tokens that were scored.
        logprobs: of each its natural log-probability after everything before it (temperature 1).
        is_greedy: of each whether it is the tier's likeliest token.
    """

    token_ids: list[int]
    logprobs: list[float]
    is_greedy: list[bool]

    @property
    def total(self) -> float:
        """Log-probability of the whole text."""
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability."""
        return math.exp(-self.total / len(self.logprobs))


def score_tokens(engine: Engine, tier: str, tokens: Sequence[int], start: int) -> Passes[Score]:
    """The score of `tokens[start:]` after `tokens[:start]`; `start` is 1 or more."""
    buffers, at, end = engine.new_buffers(), 0, len(tokens) - 1
    logprobs: list[float] = []
    greedy: list[bool] = []
    try:
        while at < end:
            # Rows cost memory of the vocabulary's width each, so they are asked for a chunk at a time.
            block = tokens[at : min(end, at + engine.prefill_chunk)]
            rows = max(1, at + len(block) - max(at, start - 1))
            result = yield PassRequest(engine, tier, Block(buffers, block, at, rows))
            assert result is not None
            at += result.fed
            if result.fed < len(block) or at < start:  # a part of the context, whose rows nobody wants
                continue
            for row, token in zip(result.rows, tokens[at - rows + 1 :], strict=False):
                logprobs.append(row.gap(token) - math.log(row.sum_exp()))
                greedy.append(row.argmax() == token)
    finally:
        engine.release(buffers)
    return Score(list(tokens[start:]), logprobs, greedy)
