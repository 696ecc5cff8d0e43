"""Mode `speculative`: drafter, then full verifier (exact)."""

from __future__ import annotations

from collections.abc import Generator

from via_sd.contract.graphs import FULL
from via_sd.runtime.decoding.run import Run


def speculative(run: Run) -> Generator[None, None, None]:
    """A block a pass, kept as far as the lossless test keeps it."""
    yield from run.prefill()
    while not run.state.done:
        draft, situation = run.propose()
        rows = run.forward(FULL, [*run.state.tokens, *draft.tokens], len(draft.tokens) + 1)
        run.learn(situation, draft, run.verify(draft, rows))
        run.end_round()
        yield
