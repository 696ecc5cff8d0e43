"""What a forward pass returns for one position: the numbers greedy decoding and the router need, and the logits."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Protocol

import numpy as np


class Row(Protocol):
    """One row of logits l, wherever they lie; the next pass over the same KV buffers makes it void."""

    def argmax(self) -> int:
        """The token with the largest logit, the first of equals."""
        ...

    def sum_exp(self) -> float:
        """Sum of exp(l - max l) over the vocabulary: 1 over the likeliest token's probability at temperature 1."""
        ...

    def gap(self, token: int) -> float:
        """l[token] - max l: 0 for the likeliest token, less for any other."""
        ...

    def margin(self) -> float:
        """The largest logit less the second largest: 0 where two are equal."""
        ...

    def is_finite(self) -> bool:
        """Whether the row has no NaN and no Inf; one that lies on a device may have -Inf."""
        ...

    @property
    def logits(self) -> np.ndarray:
        """float32 [vocab]. Asking for them may copy them from a device."""
        ...


class HostRow:
    """A row in host memory; see `Row`. Each method scans the vocabulary: the next pass changes what `logits` holds.

    Args:
        logits: float32 [vocab].
    """

    __slots__ = ("logits",)

    def __init__(self, logits: np.ndarray) -> None:
        self.logits = logits

    def argmax(self) -> int:
        return int(self.logits.argmax())

    def sum_exp(self) -> float:
        return float(np.exp(self.logits - self.logits.max()).sum())

    def margin(self) -> float:
        best = self.argmax()
        others = (self.logits[:best], self.logits[best + 1 :])
        return float(self.logits[best]) - max(float(part.max(initial=-np.inf)) for part in others)

    def is_finite(self) -> bool:
        # Both carry a NaN on, and their difference is finite only if both are.
        return isfinite(float(self.logits.max()) - float(self.logits.min()))

    def gap(self, token: int) -> float:
        return float(self.logits[token]) - float(self.logits.max())


def logits_of(rows: Sequence[Row]) -> np.ndarray:
    """The logits of all `rows`, float32 [rows, vocab]: a copy, which outlives the next pass."""
    return np.stack([row.logits for row in rows])
