"""The random stream of a text: every number is keyed by what it is for, so draws never depend on each other."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What a random number is for."""

    DRAFT = 0
    SLIM_TEST = 1
    SLIM_TOKEN = 2
    FULL_TEST = 3
    FULL_TOKEN = 4


def uniform(seed: int, attempt: int, position: int, purpose: Purpose) -> float:
    """A number in [0, 1) that depends on nothing but its key."""
    raw = np.random.Philox(key=seed, counter=[0, attempt, int(purpose), position]).random_raw()
    return float(raw >> 11) * 2.0**-53


class RandomStream:
    """The numbers of one seed.

    `attempt` counts passes: a position that is drawn again, after a rejection made its first draw void, gets a fresh
    number, so that nothing learned from the void draw can lean on the new one.
    """

    __slots__ = ("attempt", "seed")

    def __init__(self, seed: int) -> None:
        self.seed, self.attempt = seed, 0

    def uniform(self, position: int, purpose: Purpose) -> float:
        """The number for the token at `position`."""
        return uniform(self.seed, self.attempt, position, purpose)
