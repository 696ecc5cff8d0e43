"""What a drafter is to the modes: it proposes the block that the verifiers judge (the paper's p)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from via_sd.runtime.decoding.passes import Passes


@dataclass(frozen=True)
class Draft:
    """A proposed block.

    Attributes:
        tokens: the drafted tokens, in order.
        distributions: of each token the probabilities it was drawn from, None where it was not drawn (a point mass).
    """

    tokens: list[int] = field(default_factory=list)
    distributions: list[np.ndarray | None] = field(default_factory=list)


class Drafter(Protocol):
    """Proposes blocks for one sequence. What it adapts to is that sequence's own past, never a clock."""

    #: Relative cost of drafting one token, in plain steps of the full verifier.
    cost: float

    def propose(self, sequence: Sequence[int], limit: int) -> Passes[Draft]:
        """At most `limit` tokens to follow `sequence` (which may have been rolled back since the last call)."""
        ...

    def expectation(self, sequence: Sequence[int]) -> int:
        """A class of situations that tend to be accepted alike (n-gram match length, say); small integers."""
        ...

    def truncate(self, length: int) -> None:
        """The sequence has been cut back to `length` tokens."""
        ...

    @property
    def seconds(self) -> float:
        """Time spent inside an engine."""
        ...

    @property
    def calls(self) -> int:
        """Calls of an engine."""
        ...
