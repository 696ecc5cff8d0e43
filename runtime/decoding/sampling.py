"""Probabilities and draws: what a tier would emit after a row, and how a token is drawn from it.

The *probabilities* of a row are processed: logits processors (the repetition penalty), temperature, top-k, top-p and
min-p in that order, the same for drafter, slim and full. Acceptance tests compare these, never raw softmaxes. At
temperature 0 all probability is on the processed argmax, and exact modes reduce to comparing tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from via_sd.contract.generation_options import GenerationConfig
from via_sd.runtime.engines.rows import Row


class LogitsProcessor(Protocol):
    """Changes logits by what precedes them, before anything is chosen or drawn."""

    def __call__(self, logits: np.ndarray, context: Sequence[int], draft: Sequence[int]) -> np.ndarray:
        """Logits of the token after `context` and then `draft`: a new array, float32 [vocab]."""
        ...


class RepetitionPenalty:
    """Divides positive and multiplies negative logits of tokens that precede by `penalty` (Keskar et al. 2019)."""

    def __init__(self, penalty: float) -> None:
        self._penalty = penalty

    def __call__(self, logits: np.ndarray, context: Sequence[int], draft: Sequence[int]) -> np.ndarray:
        """See `LogitsProcessor`."""
        present = np.unique(np.fromiter((*context, *draft), np.int64))
        result: np.ndarray = logits.copy()
        values = result[present]
        result[present] = np.where(values > 0, values / self._penalty, values * self._penalty)
        return result


def logits_processors(config: GenerationConfig) -> list[LogitsProcessor]:
    """The logits processors that `config` asks for, in the order in which they apply."""
    return [] if config.repetition_penalty == 1 else [RepetitionPenalty(config.repetition_penalty)]


class Processor:
    """Turns the rows of one sequence into tokens or probabilities, as its request asks.

    Attributes:
        greedy: whether tokens are chosen rather than drawn.
        needs_only_best: whether a token takes no more of its row than the argmax.
    """

    def __init__(self, config: GenerationConfig) -> None:
        self._config = config
        self._processors = logits_processors(config)
        self.greedy = config.greedy
        self.needs_only_best = config.greedy and not self._processors

    def best(self, row: Row, context: Sequence[int], draft: Sequence[int] = ()) -> int:
        """The greedy token of a row that follows `context` and then `draft`."""
        return row.argmax() if self.needs_only_best else int(self._logits(row, context, draft).argmax())

    def probabilities(self, row: Row, context: Sequence[int], draft: Sequence[int] = ()) -> np.ndarray:
        """Probabilities of a row that follows `context` and then `draft`, float64 [vocab]; needs temperature > 0."""
        config = self._config
        scaled = self._logits(row, context, draft).astype(np.float64)
        if 0 < config.top_k < len(scaled):
            floor = np.partition(scaled, -config.top_k)[-config.top_k]
            scaled[scaled < floor] = -np.inf
        scaled -= scaled.max()
        with np.errstate(over="ignore"):  # a tiny temperature leaves nothing but the likeliest
            scaled /= config.temperature
        probabilities = np.exp(scaled)
        probabilities /= probabilities.sum()
        if config.top_p < 1:
            order = np.argsort(-probabilities, kind="stable")
            before = np.cumsum(probabilities[order]) - probabilities[order]
            probabilities[order[before >= config.top_p]] = 0
        if config.min_p > 0:
            probabilities[probabilities < config.min_p * probabilities.max()] = 0
        result: np.ndarray = probabilities / probabilities.sum()
        return result

    def _logits(self, row: Row, context: Sequence[int], draft: Sequence[int]) -> np.ndarray:
        logits = row.logits
        for process in self._processors:
            logits = process(logits, context, draft)
        return logits


def draw(probabilities: np.ndarray, u: float) -> int:
    """The token at quantile `u` of `probabilities` (inverse CDF); never one of probability zero."""
    cumulative = np.cumsum(probabilities)
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return min(index, int(np.flatnonzero(probabilities)[-1]))
