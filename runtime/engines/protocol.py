"""The seam between decoding and whatever runs the graphs: engines and their KV buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from via_sd.runtime.engines.rows import Row


class KVBuffers(Protocol):
    """One sequence's KV buffers, [1, heads, max_seq_len, head_dim] per layer and part, updated in place."""

    def forward(self, tier: str, tokens: Sequence[int], past: int, rows: int) -> Sequence[Row]:
        """Feed `tokens` at positions `past`, `past + 1`, … and return what follows the last `rows` of them.

        What the buffers hold from position `past` on is overwritten. An engine runs one pass at a time: not to be
        called by several threads at once.

        Returns:
            A row for each of them; the engine's next pass makes them void.
        """
        ...


class Block(NamedTuple):
    """Tokens of one sequence in a forward pass; see `KVBuffers.forward`."""

    buffers: Any
    tokens: Sequence[int]
    past: int
    rows: int


class Engine(Protocol):
    """A loaded model, one or several tiers of it over one set of weights."""

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers it can run, highest rank first; `full` is the first."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_seq_len(self) -> int: ...

    @property
    def prefill_chunk(self) -> int:
        """Tokens of a long prompt to feed at once: enough to keep the device busy, few enough to stop in between."""
        ...

    @property
    def max_sequences(self) -> int:
        """Sequences that one forward pass takes at most."""
        ...

    def new_buffers(self) -> KVBuffers:
        """Allocate KV buffers for one sequence."""
        ...

    def release(self, buffers: Any) -> None:
        """Take back KV buffers that nobody will use again, though somebody may still refer to them."""
        ...

    def copy(self, source: Any, target: Any, positions: int) -> bool:
        """Copy the KV of the first `positions` positions between buffers, if the engine can; whether it has.

        A pass may run meanwhile, as long as it writes to none of these positions and does not use `target`.
        """
        ...

    def forward(self, tier: str, blocks: Sequence[Block]) -> Sequence[Sequence[Row]]:
        """One forward pass of `tier` over tokens of several sequences, each with buffers of its own.

        Returns:
            For each block the rows `KVBuffers.forward` returns; the engine's next pass makes all of them void.
        """
        ...


class OneSequencePerPass:
    """The part of an `Engine` that is about batches, for engines whose passes take one sequence."""

    max_sequences = 1

    def release(self, buffers: Any) -> None:
        """See `Engine.release`: their memory is freed with the last reference to them."""

    def copy(self, source: Any, target: Any, positions: int) -> bool:
        """See `Engine.copy`: it cannot."""
        return False

    def forward(self, tier: str, blocks: Sequence[Block]) -> list[Sequence[Row]]:
        """See `Engine.forward`."""
        (block,) = blocks
        return [block.buffers.forward(tier, block.tokens, block.past, block.rows)]


class ReadableKVBuffers(KVBuffers, Protocol):
    """KV buffers whose contents can be read, which checks do and decoding does not."""

    def keys_values(self, layer: int) -> np.ndarray:
        """What the buffers of `layer` hold, float32 [parts, heads, max_seq_len, head_dim]."""
        ...


class ReadableEngine(Engine, Protocol):
    """An engine of readable KV buffers."""

    @property
    def kv(self) -> dict[str, Any]:
        """Naming, geometry and dtype of the KV buffers, as a manifest has them."""
        ...

    def new_buffers(self) -> ReadableKVBuffers: ...
