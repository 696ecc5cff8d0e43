"""The random stream of a text: every number is keyed by what it is for, so draws never depend on each other."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np


class Purpose(IntEnum):
    """What a random number is for."""

    DRAFT = 0
    SLIM_TEST = 1
    SLIM_TOKEN = 2
    FULL_TEST = 3
    FULL_TOKEN = 4


class RandomStream:
    """The numbers of one seed, each in [0, 1), which depend on nothing but their key: seed, attempt, position, purpose.

    `attempt` counts passes: a position that is drawn again, after a rejection made its first draw void, gets a fresh
    number, so that nothing learned from the void draw can lean on the new one.
    """

    __slots__ = ("_counter", "_generator", "_state", "attempt", "seed")

    def __init__(self, seed: int) -> None:
        self.seed, self.attempt = seed, 0
        # A generator is slow to make; one whose counter is set gives the numbers of a new one.
        self._generator = np.random.Philox(key=seed)
        self._state: Any = self._generator.state
        self._counter = self._state["state"]["counter"]

    def uniform(self, position: int, purpose: Purpose) -> float:
        """The number for the token at `position`."""
        self._counter[:] = 0, self.attempt, purpose, position
        self._generator.state = self._state
        return float(self._generator.random_raw() >> 11) * 2.0**-53
