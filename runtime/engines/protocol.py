"""The seam between decoding and whatever runs the graphs: engines and their KV buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from via_sd.runtime.engines.rows import Row


class KVBuffers(Protocol):
    """One sequence's KV buffers, [1, heads, max_seq_len, head_dim] per layer and part, updated in place."""

    def forward(self, tier: str, tokens: Sequence[int], past: int, rows: int) -> Sequence[Row]:
        """Feed `tokens` at positions `past`, `past + 1`, … and return what follows the last `rows` of them.

        What the buffers hold from position `past` on is overwritten. One sequence's buffers serve one thread at a
        time; those of different sequences may be used at once.

        Returns:
            A row for each of them; the next call makes them void.
        """
        ...


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

    def new_buffers(self) -> KVBuffers:
        """Allocate KV buffers for one sequence."""
        ...


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
