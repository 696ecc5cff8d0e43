"""Probabilities and draws: what a tier would emit after a row, and how a token is drawn from it.

The *probabilities* of a row are processed: logits processors (penalties, biases, constraints), temperature, top-k,
top-p and min-p in that order, the same for drafter, slim and full. Acceptance tests compare these, never raw
softmaxes. At temperature 0 all probability is on the processed argmax, and exact modes reduce to comparing tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from via_sd.contract.generation_options import GenerationConfig
from via_sd.errors import RequestError
from via_sd.runtime.decoding.logits_processors import Constraint, LogitsProcessor, logits_processors
from via_sd.runtime.engines.rows import HostRow, Row


class Processor:
    """Turns the rows of one sequence into tokens or probabilities, as its request asks.

    Args:
        processors: change the logits, after those that follow from `config`.
        start: length of the prompt.

    Attributes:
        greedy: whether tokens are chosen rather than drawn.
        needs_only_best: whether a token takes no more of its row than the argmax.
        is_constrained: whether tokens can be ruled out.
    """

    def __init__(self, config: GenerationConfig, processors: Sequence[LogitsProcessor] = (), *, start: int = 0) -> None:
        self._config, self._processors = config, [*logits_processors(config, start), *processors]
        self._constraints = [each for each in self._processors if isinstance(each, Constraint)]
        self.greedy = config.greedy
        self.needs_only_best = config.greedy and not self._processors
        self.is_constrained = bool(self._constraints)
        self._dead_ends: set[tuple[int, ...]] = set()

    def best(self, row: Row, context: Sequence[int], draft: Sequence[int] = ()) -> int:
        """The greedy token of a row that follows `context` and then `draft`."""
        return row.argmax() if self.needs_only_best else int(self._logits(row, context, draft).argmax())

    def allowed(self, context: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of `tokens`, from the first on, the constraints let follow `context`."""
        return min((each.allowed(context, tokens) for each in self._constraints), default=len(tokens))

    def forced(self, context: Sequence[int]) -> list[int]:
        """Tokens that a constraint forces to follow `context`, as far as the others let them."""
        tokens = max((each.forced(context) for each in self._constraints), key=len, default=[])
        return tokens[: self.allowed(context, tokens)]

    def constrained(self, row: Row, context: Sequence[int]) -> Row:
        """The row that follows `context` without the tokens that are ruled out, otherwise as it was."""
        if not self._constraints:
            return row
        logits = row.logits
        for constraint in self._constraints:
            logits = constraint(logits, context, ())
        return HostRow(self._or_dead_end(logits, row, context))

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
        return self._or_dead_end(logits, row, context, draft)

    def _or_dead_end(
        self, logits: np.ndarray, row: Row, context: Sequence[int], draft: Sequence[int] = ()
    ) -> np.ndarray:
        """`logits`; the row's own where the constraints leave nothing.

        A drafter or slim may run into such a place where the full verifier does not: only `check` makes it an error.
        """
        if not self._constraints or logits.max() > -np.inf:
            return logits
        self._dead_ends.add((*context, *draft))
        return row.logits

    def check(self, context: Sequence[int]) -> None:
        """Raise RequestError if the constraints let nothing follow `context`, to which a token is to be emitted."""
        if self._dead_ends and tuple(context) in self._dead_ends:
            raise RequestError(
                f"the request rules out every token at position {len(context)}: its constraints contradict each other"
            )


def draw(probabilities: np.ndarray, u: float) -> int:
    """The token at quantile `u` of `probabilities` (inverse CDF); never one of probability zero."""
    cumulative = np.cumsum(probabilities)
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return min(index, int(np.flatnonzero(probabilities)[-1]))
