"""Distributions over a vocabulary, kept compactly: two bytes per entry."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from via_sd.masks.objective import Array

#: Log-probabilities are kept as multiples of this many nats ...
STEP = 1 / 1024
#: ... down to this one; anything less likely counts as this likely.
LOWEST = -STEP * np.iinfo(np.uint16).max


class CompactDistributions:
    """Log-probabilities of many positions, [positions, vocab], as 16-bit fixed point numbers.

    Half the memory of float32, and a lookup instead of a forward pass. What it costs: a log-probability is off by at
    most 1/2048 nats (a probability by 0.05 %) wherever it is above -64 nats, the same at both ends of the scale, where
    float16 would be off by up to 1/64 nats. Objectives take averages of such errors, which have no preferred sign.
    """

    def __init__(self, positions: int, vocab_size: int) -> None:
        self._steps = np.empty((positions, vocab_size), np.uint16)
        #: Likeliest token of each position, int64 [positions].
        self.best = np.empty(positions, np.int64)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def vocab_size(self) -> int:
        return self._steps.shape[1]

    @property
    def nbytes(self) -> int:
        return self._steps.nbytes

    def store(self, start: int, log_probs: Array) -> None:
        """Keep `log_probs` [rows, vocab] as the positions from `start` on."""
        rows = slice(start, start + len(log_probs))
        self.best[rows] = log_probs.argmax(-1)
        steps = np.clip(log_probs, LOWEST, 0)
        steps *= -1 / STEP
        self._steps[rows] = np.rint(steps, out=steps)

    def log_probs(self, start: int, stop: int) -> NDArray[np.float32]:
        """Log-probabilities of positions `start` to `stop` (not included), float32 [rows, vocab], in nats."""
        values = self._steps[start:stop].astype(np.float32)
        values *= -STEP
        return values


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Natural log-probabilities along the last axis of finite `logits` [rows, vocab]; float32, normaliser float64."""
    shifted = logits - logits.max(-1, keepdims=True)
    total = np.exp(shifted).sum(-1, keepdims=True, dtype=np.float64)
    shifted -= np.log(total).astype(np.float32)
    result: np.ndarray = shifted
    return result
