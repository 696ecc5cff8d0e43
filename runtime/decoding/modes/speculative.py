"""Mode `speculative`: drafter, then full verifier (exact)."""

from __future__ import annotations

from via_sd.contract.graphs import FULL
from via_sd.runtime.decoding.passes import ALONE, Passes
from via_sd.runtime.decoding.run import Run


def speculative(run: Run) -> Passes[None]:
    """A block a pass, kept as far as the lossless test keeps it."""
    yield from run.prefill()
    while not run.state.done:
        # A greedy text is the same however long its drafts are; a drawn one is not, and must not depend on others.
        beside = run.cache.beside[FULL] if run.processor.greedy else ALONE
        draft, situation = yield from run.propose(beside)
        rows = yield from run.forward(FULL, [*run.state.tokens, *draft.tokens], len(draft.tokens) + 1)
        run.learn(situation, draft, run.verify(draft, rows))
        run.end_round()
        yield None
