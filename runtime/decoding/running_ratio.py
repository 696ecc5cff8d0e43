"""The average behind every adaptive choice: a ratio of two sums, of which older evidence fades."""

from __future__ import annotations


class RunningRatio:
    """An amount per unit, such as tokens accepted per token judged, or tokens per cost.

    The value is (prior * weight + amounts) / (weight + units), where amounts and units are sums over the evidence, each
    piece multiplied by `memory` for every step since. It follows what was counted alone, never a clock, so that the
    same seed gives the same output.

    Args:
        memory: what the evidence keeps of its weight per step, 0 to 1; it reaches back about 1 / (1 - memory) steps.
        prior: the value before there is evidence.
        weight: the units of evidence that the prior counts for; the prior never fades.
    """

    __slots__ = ("_amount", "_memory", "_prior", "_units", "_weight")

    def __init__(self, memory: float, prior: float = 0.0, weight: float = 0.0) -> None:
        self._memory, self._prior, self._weight = memory, prior * weight, weight
        self._amount = self._units = 0.0

    @property
    def value(self) -> float:
        """The ratio; a ratio without a prior has none before there is evidence."""
        return (self._amount + self._prior) / (self._units + self._weight)

    @property
    def units(self) -> float:
        """Units of the evidence, without the prior's."""
        return self._units

    def add(self, amount: float, units: float = 1.0, *, steps: int = 1) -> None:
        """Take new evidence, `steps` after the last."""
        kept = self._memory**steps
        self._amount = self._amount * kept + amount
        self._units = self._units * kept + units

    def fade(self, factor: float | None = None) -> None:
        """Multiply the evidence by `factor`, `memory` if None."""
        if factor is None:
            factor = self._memory
        self._amount *= factor
        self._units *= factor
