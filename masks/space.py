"""What a search chooses from: masks of a space; units that are kept or skipped whole until a budget is spent."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from via_sd.masks.mask import Mask

Granularity = Literal["layer", "sublayer"]
#: What a mask does otherwise than full, as ascending numbers whose meaning the space knows.
Selection = tuple[int, ...]


class Masks(Protocol):
    """A space of masks: what selections mean, and which of them a search may return."""

    @property
    def size(self) -> int:
        """Selections hold numbers below this."""

    def mask(self, selection: Collection[int], **fields: Any) -> Mask:
        """The mask that `selection` makes, with the other fields of `Mask`."""

    def is_complete(self, selection: Collection[int]) -> bool:
        """Whether the mask is as small, or as cheap, as was asked for."""


@dataclass(frozen=True)
class Space:
    """The masks that skip exactly `budget` units; the first and the last layer are always kept (paper section 2.4).

    A unit is a layer, or one sublayer; units are numbered in order of execution, and a selection holds those that are
    skipped.
    """

    num_layers: int
    granularity: Granularity
    budget: int

    @classmethod
    def of(cls, num_layers: int, skip_ratio: float, granularity: Granularity) -> Space:
        """The space of a model with `num_layers` layers of which `round(skip_ratio * num_layers)` are skipped, or twice
        that many sublayers (Eq. 13).

        Raises:
            ValueError: a ratio that skips nothing, or more than there is between the first and the last layer.
        """
        if granularity not in ("layer", "sublayer"):
            raise ValueError(f"granularity is {granularity!r}, wanted layer or sublayer")
        layers = round(skip_ratio * num_layers)
        if not 1 <= layers <= num_layers - 2:
            raise ValueError(
                f"skip ratio {skip_ratio} means {layers} of {num_layers} layers; wanted 1 to {num_layers - 2}: the "
                "first and the last layer are kept"
            )
        return cls(num_layers, granularity, layers if granularity == "layer" else 2 * layers)

    @property
    def size(self) -> int:
        """Number of units."""
        return (self.num_layers - 2) * (1 if self.granularity == "layer" else 2)

    def mask(self, selection: Collection[int], **fields: Any) -> Mask:
        """The mask that skips the units in `selection`."""
        keep = [True] * (2 * self.num_layers)
        for unit in selection:
            if self.granularity == "layer":
                keep[2 * unit + 2] = keep[2 * unit + 3] = False
            else:
                keep[unit + 2] = False
        return Mask.from_flags(keep[::2], keep[1::2], **fields)

    def is_complete(self, selection: Collection[int]) -> bool:
        """Whether `selection` skips the whole budget."""
        return len(selection) == self.budget

    def evenly_spaced(self) -> Selection:
        """Units skipped at regular distances: what one does without a search."""
        step = self.size / self.budget
        return tuple(int((index + 0.5) * step) for index in range(self.budget))
