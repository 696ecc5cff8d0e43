"""The audit of mode `routed`: what the full verifier would have said about tokens that slim accepted alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from via_sd.contract.graphs import FULL
from via_sd.runtime.decoding.drafters import Draft
from via_sd.runtime.decoding.passes import Passes
from via_sd.runtime.decoding.run import Item, Run
from via_sd.runtime.decoding.statistics import JudgedMargin
from via_sd.runtime.engines.rows import Row


class Audit:
    """Emits tokens that the slim-verifier accepts alone, and compares them with the full verifier when that runs."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._distributions: list[np.ndarray] = []  # slim's, of the tokens it let through (temperature > 0)
        self._noted: list[tuple[int, float, int]] = []  # where full has not been: position, slim's margin and argmax

    def let_through(self, item: Item, row: Row) -> bool:
        """Emit a token that the slim-verifier accepts alone; False once the text is complete."""
        run = self._run
        self._note(row)
        if not run.processor.greedy:
            self._distributions.append(run.processor.probabilities(row, run.state.tokens))
        return run.emit(item, row, checked=False)

    def escalate(self, draft: Draft, doubted: Row | None = None) -> Passes[int]:
        """A full pass over everything not cached for full and `draft`, which it judges alone; how much of it is kept.

        `doubted` is the row of slim's on which the router escalated.
        """
        run = self._run
        if doubted is not None:
            self._note(doubted)
        lag = run.lag
        rows = yield from run.forward(FULL, [*run.state.tokens, *draft.tokens], lag + len(draft.tokens) + 1)
        self._compare(rows, lag)
        return run.verify(draft, rows[lag:])

    def tail(self) -> Passes[None]:
        """Judge what is left at the end of the text, so that every token was judged."""
        lag = self._run.lag
        if lag > 0:
            rows = yield from self._run.forward(FULL, self._run.state.tokens[:-1], lag)
            self._compare(rows, lag)

    def _note(self, row: Row) -> None:
        if self._run.routing.keep_margins:
            self._noted.append((self._run.counters.emitted_tokens, row.margin(), row.argmax()))

    def _compare(self, rows: Sequence[Row], count: int) -> None:
        """Compare `count` of full's `rows` with the last emitted tokens: argmax, or overlap of distributions."""
        run, counters = self._run, self._run.counters
        # Where the router escalated, there is one more of slim's rows than tokens it accepted.
        for (position, margin, token), row in zip(self._noted, rows, strict=False):
            counters.margins.append(JudgedMargin(position, margin, row.argmax() == token))
        self._noted.clear()
        rows, tokens = rows[:count], run.state.tokens
        before, audited = tokens[: len(tokens) - count], tokens[len(tokens) - count :]
        if run.processor.greedy:
            best = (run.processor.best(row, before, audited[:j]) for j, row in enumerate(rows))
            disagreement = [float(b != token) for b, token in zip(best, audited, strict=True)]
        else:
            full = [run.processor.probabilities(row, before, audited[:j]) for j, row in enumerate(rows)]
            pairs = zip(full, self._distributions, strict=True)
            disagreement = [1 - float(np.minimum(q, u).sum()) for q, u in pairs]
            self._distributions.clear()
        counters.checked += count
        counters.audited += count
        counters.disagreement += sum(disagreement)
        run.routing.guard.audited(disagreement)
