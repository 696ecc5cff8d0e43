"""Mode `plain`: the full verifier alone, the reference."""

from __future__ import annotations

from via_sd.contract.graphs import FULL
from via_sd.runtime.decoding.passes import Passes
from via_sd.runtime.decoding.random_stream import Purpose
from via_sd.runtime.decoding.run import Item, Run


def plain(run: Run) -> Passes[None]:
    """A token a pass."""
    yield from run.prefill()
    state = run.state
    while not state.done:
        (row,) = yield from run.forward(FULL, state.tokens, 1)
        run.emit(Item(run.sample(row, state.tokens, Purpose.FULL_TOKEN), "full"), row)
        run.end_round()
        yield None
