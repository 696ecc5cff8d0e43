"""Is a middle tier worth inserting: the paper's Delta criterion."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from via_sd.masks.objective import Array, Objective

_ROWS = 64  # positions compared at a time


class Distributions(Protocol):
    """Log-probabilities of positions, as `CompactDistributions` and `LookupDistributions` give them."""

    def __len__(self) -> int: ...

    def log_probs(self, start: int, stop: int) -> Array: ...


@dataclass(frozen=True)
class Delta:
    """Delta(u) = C(q||p) - C(u||p) - C(q||u) for drafter p, slim-verifier u and full verifier q (paper section 2.4).

    Attributes:
        drafter_to_full: C(q||p), what the drafter misses of full.
        drafter_to_slim: C(u||p), what the drafter misses of slim.
        slim_to_full: C(q||u), what slim misses of full.
        positions: over how many positions; the costs are means in nats per position.
    """

    drafter_to_full: float
    drafter_to_slim: float
    slim_to_full: float
    positions: int

    @property
    def value(self) -> float:
        return self.drafter_to_full - self.drafter_to_slim - self.slim_to_full

    @property
    def pays(self) -> bool:
        """Whether two short steps cost less than the long one: slim is worth inserting."""
        return self.value > 0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "value": self.value, "pays": self.pays}


class LookupDistributions:
    """The distribution of a drafter that proposes one token, or none: all its probability on that token.

    Args:
        proposals: proposed token of each position, -1 where there is none.
        vocab_size: length of a row.
    """

    def __init__(self, proposals: NDArray[np.int64], vocab_size: int) -> None:
        self._proposals = proposals
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self._proposals)

    @property
    def proposed(self) -> NDArray[np.bool_]:
        """Where there is a proposal."""
        return self._proposals >= 0

    def log_probs(self, start: int, stop: int) -> NDArray[np.float32]:
        tokens = self._proposals[start:stop]
        rows = np.full((len(tokens), self._vocab_size), -np.inf, np.float32)
        rows[np.arange(len(tokens)), tokens] = 0
        return rows


def delta_criterion(
    full: Distributions,
    slim: Distributions,
    drafter: Distributions,
    objective: Objective,
    *,
    positions: NDArray[np.bool_] | None = None,
) -> Delta:
    """Compute Delta for a drafter over the positions marked in `positions` (all by default).

    Raises:
        ValueError: the three differ in their number of positions, or no position is marked.
    """
    if not len(full) == len(slim) == len(drafter):
        raise ValueError(f"full, slim and drafter have {len(full)}, {len(slim)} and {len(drafter)} positions")
    marked = np.ones(len(full), bool) if positions is None else positions
    if not marked.any():
        raise ValueError("no position to compare: the drafter proposes nothing")
    sums = np.zeros(3)
    for start in range(0, len(full), _ROWS):
        chosen = marked[start : start + _ROWS]
        if not chosen.any():
            continue
        q, u, p = (d.log_probs(start, min(start + _ROWS, len(full)))[chosen] for d in (full, slim, drafter))
        sums += [objective(q, p).sum(), objective(u, p).sum(), objective(q, u).sum()]
    means = sums / marked.sum()
    return Delta(float(means[0]), float(means[1]), float(means[2]), int(marked.sum()))
