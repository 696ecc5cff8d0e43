"""Forward passes as decoding asks for them.

Decoding is written as generators: one yields the forward pass that it needs and is sent the result. So whoever drives a
sequence decides when its passes run, and together with whose.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from time import perf_counter
from typing import NamedTuple, TypeVar

from via_sd.runtime.engines.protocol import Block, Engine
from via_sd.runtime.engines.rows import Row

T = TypeVar("T")


class PassRequest(NamedTuple):
    """A forward pass of `tier` over the tokens of `block`."""

    engine: Engine
    tier: str
    block: Block

    def part(self, limit: int) -> Block:
        """The block, or its first `limit` tokens where it is longer by more than those that get logits."""
        block = self.block
        if len(block.tokens) <= limit + block.rows:
            return block
        return block._replace(tokens=block.tokens[:limit], rows=1)


class Beside(NamedTuple):
    """What others have in a pass: how many sequences, and how many tokens of theirs."""

    sequences: int
    tokens: int

    @property
    def kept(self) -> float:
        """Tokens of theirs that are expected to be kept: of each sequence one, and half of what it drafts."""
        return (self.sequences + self.tokens) / 2


#: Nobody shares the pass.
ALONE = Beside(0, 0)


class PassResult(NamedTuple):
    """What came of a requested pass.

    Attributes:
        rows: what follows each of the last tokens; the sequence's next pass makes it void.
        fed: tokens of the block that were fed; fewer than asked for, and a row of no use, if it has to go on.
        seconds: inside the engine.
        waited: seconds in which passes of other sequences ran since this one was asked for.
        paused: seconds in which nobody ran any.
        beside: who shared it.
    """

    rows: Sequence[Row]
    fed: int
    seconds: float
    waited: float = 0.0
    paused: float = 0.0
    beside: Beside = ALONE


#: A computation that asks for forward passes and returns a T; a None among the requests ends a round.
Passes = Generator[PassRequest | None, PassResult | None, T]


def run_alone(request: PassRequest) -> PassResult:
    """Run `request`, or the first chunk of a long one, as a pass of its own."""
    block, begun = request.part(request.engine.prefill_chunk), perf_counter()
    rows = block.buffers.forward(request.tier, block.tokens, block.past, block.rows)
    return PassResult(rows, len(block.tokens), perf_counter() - begun)


def complete(passes: Passes[T]) -> T:
    """Run every pass that is asked for alone; what the computation returns."""
    result: PassResult | None = None
    while True:
        try:
            request = passes.send(result)
        except StopIteration as end:
            found: T = end.value
            return found
        result = None if request is None else run_alone(request)
