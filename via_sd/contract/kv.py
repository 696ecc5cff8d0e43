"""The KV buffers of a decoder: their names in its graphs, their shape, their element type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from via_sd.contract.graphs import PARTS, PAST, PRESENT
from via_sd.contract.values import DIMENSION, Contract, Value, one_of

#: What a manifest says of KV buffers.
KV: Contract = {
    "past": one_of(PAST),
    "present": one_of(PRESENT),
    "parts": Value(f"{list(PARTS)}", lambda value: value == list(PARTS)),
    "num_layers": DIMENSION,
    "num_heads": DIMENSION,
    "head_dim": DIMENSION,
    "dtype": one_of("float32", "float16", "bfloat16"),
}


@dataclass(frozen=True)
class KVLayout:
    """KV buffers of a decoder: one for each part of each layer, [batch, num_heads, capacity, head_dim].

    Attributes:
        dtype: element type, as numpy calls it (`bfloat16` is none of numpy's own).
        past, present: names of the input and the output, from `layer` and `part`.
        parts: what a layer has, in this order.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: str
    past: str = PAST
    present: str = PRESENT
    parts: tuple[str, ...] = PARTS

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KVLayout:
        """The layout that a manifest describes."""
        return cls(
            num_layers=int(data["num_layers"]),
            num_heads=int(data["num_heads"]),
            head_dim=int(data["head_dim"]),
            dtype=str(data["dtype"]),
            past=str(data["past"]),
            present=str(data["present"]),
            parts=tuple(str(part) for part in data["parts"]),
        )

    def to_json(self) -> dict[str, Any]:
        """The layout as a manifest has it."""
        return {
            "past": self.past,
            "present": self.present,
            "parts": list(self.parts),
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
        }

    def names(self, layer: int) -> Iterator[tuple[str, str]]:
        """Input and output of each buffer of `layer`, part by part."""
        for part in self.parts:
            yield self.past.format(layer=layer, part=part), self.present.format(layer=layer, part=part)

    def shape(self, capacity: int) -> tuple[int, int, int, int]:
        """Of the buffer of one part of one layer, for one sequence of at most `capacity` tokens."""
        return 1, self.num_heads, capacity, self.head_dim

    def allocate(self, capacity: int) -> np.ndarray:
        """Buffers of one sequence, [layers, parts, 1, num_heads, capacity, head_dim], full of zeros.

        One allocation, untouched until it is written: memory is taken as the sequence grows.
        """
        return np.zeros((self.num_layers, len(self.parts), *self.shape(capacity)), self.dtype)
