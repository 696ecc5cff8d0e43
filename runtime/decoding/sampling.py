"""Probabilities and draws: what a tier would emit, how a token is drawn, and the random stream all draws share.

The *probabilities* of a row are processed: repetition penalty, temperature, top-k, top-p and min-p in that order, the
same for drafter, slim and full. Acceptance tests compare these, never raw softmaxes. At temperature 0 all probability
is on the processed argmax, and exact modes reduce to comparing tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from via_sd.contract.generation_options import GenerationConfig
from via_sd.runtime.engines.rows import Row


class Purpose(IntEnum):
    """What a random number is for: with seed and position it keys the stream, so draws never depend on each other."""

    DRAFT = 0
    SLIM_TEST = 1
    SLIM_TOKEN = 2
    FULL_TEST = 3
    FULL_TOKEN = 4


def uniform(seed: int, attempt: int, position: int, purpose: Purpose) -> float:
    """A number in [0, 1) that depends on nothing but its key.

    `attempt` counts the sequence's passes: a position that is drawn again, after a rejection made its first draw void,
    gets a fresh number, so that nothing learned from the void draw can lean on the new one.
    """
    raw = np.random.Philox(key=seed, counter=[0, attempt, int(purpose), position]).random_raw()
    return float(raw >> 11) * 2.0**-53


class Processor:
    """Turns logits into probabilities for one sequence."""

    def __init__(self, config: GenerationConfig) -> None:
        self.config = config

    @property
    def needs_only_best(self) -> bool:
        """Whether a token takes no more of its row than the best."""
        return self.config.greedy and self.config.repetition_penalty == 1

    def best(self, row: Row, context: Sequence[int], draft: Sequence[int] = ()) -> int:
        """The greedy token of a row that follows `context` and then `draft`."""
        return row.argmax() if self.needs_only_best else int(self._penalised(row, context, draft).argmax())

    def probabilities(self, row: Row, context: Sequence[int], draft: Sequence[int] = ()) -> np.ndarray:
        """Probabilities of a row that follows `context` and then `draft`, float64 [vocab]; needs temperature > 0."""
        config = self.config
        scaled = self._penalised(row, context, draft).astype(np.float64)
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

    def _penalised(self, row: Row, context: Sequence[int], draft: Sequence[int]) -> np.ndarray:
        """The row's logits with the repetition penalty of what precedes it."""
        penalty = self.config.repetition_penalty
        if penalty == 1:
            return row.logits
        present = np.unique(np.fromiter((*context, *draft), np.int64))
        logits: np.ndarray = row.logits.copy()
        values = logits[present]
        logits[present] = np.where(values > 0, values / penalty, values * penalty)
        return logits


def draw(probabilities: np.ndarray, u: float) -> int:
    """The token at quantile `u` of `probabilities` (inverse CDF); never one of probability zero."""
    cumulative = np.cumsum(probabilities)
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return min(index, int(np.flatnonzero(probabilities)[-1]))


def acceptance(target: np.ndarray, proposal: np.ndarray | None, token: int) -> float:
    """Probability of keeping `token` drawn from `proposal` as a draw from `target` (Leviathan et al.; Chen et al.).

    A `proposal` of None is a point mass on `token` (a deterministic draft).
    """
    if proposal is None:
        return float(target[token])
    if proposal[token] <= 0:
        return 0.0
    return min(1.0, float(target[token] / proposal[token]))


def residual(target: np.ndarray, proposal: np.ndarray | None, token: int) -> np.ndarray:
    """Probabilities of the token that replaces a rejected one: max(0, target - proposal), normalised."""
    if proposal is None:
        rest = target.copy()
        rest[token] = 0
    else:
        rest = np.maximum(target - proposal, 0)
    total = rest.sum()
    # Where nothing is left the distributions are equal to rounding, and a rejection was itself a rounding artefact.
    return rest / total if total > 0 else target
