"""What a search within a cost chooses from: a state for every layer or sublayer and for the LM head."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from via_sd.masks.mask import QUANTISED_STATES, HeadState, Mask, SublayerState
from via_sd.masks.space import Granularity, Selection
from via_sd.masks.step_costs import StepCosts

#: States a search gives to sublayers.
SEARCHED_STATES: tuple[SublayerState, ...] = ("keep", "skip", "int8", "int4")
#: A mask is found by its savings in steps of this share of what has to be saved.
_STEPS = 2000


@dataclass(frozen=True)
class StateSpace:
    """The masks of given states whose decoding step takes at most `limit` of a step of full.

    Units are the layers, or the sublayers, in order of execution, and behind them the LM head where there are quantised
    states. The first and the last layer are never skipped (paper section 2.4). A selection holds *choices*: a unit and
    a state other than `keep`; it has at most one of each unit.
    """

    num_layers: int
    granularity: Granularity
    states: tuple[SublayerState, ...]
    costs: StepCosts
    limit: float

    @classmethod
    def of(
        cls, num_layers: int, granularity: Granularity, states: Sequence[str], costs: StepCosts, limit: float
    ) -> StateSpace:
        """The space of a model with `num_layers` layers.

        Raises:
            ValueError: a state that a search does not give, a limit outside 0 to 1, or one that no mask reaches.
        """
        unknown = [state for state in states if state not in SEARCHED_STATES]
        if unknown or len(set(states)) != len(states) or {*states} <= {"keep"}:
            raise ValueError(
                f"states are {', '.join(states) or 'none'}; wanted some of {', '.join(SEARCHED_STATES)}, each once, "
                "and one besides keep"
            )
        if granularity not in get_args(Granularity):
            raise ValueError(f"granularity is {granularity!r}, wanted layer or sublayer")
        if not 0 < limit < 1:
            raise ValueError(f"a cost is {limit:g}, wanted a share of full's step between 0 and 1")
        space = cls(num_layers, granularity, tuple(s for s in SEARCHED_STATES if s in states), costs, limit)
        least = costs.of(space.mask(space.cheapest()))
        if least > limit:
            raise ValueError(
                f"no mask of the states {', '.join(space.states)} costs {limit:g} of full's step: the cheapest costs "
                f"{least:.3f}; ask for more, or allow more states"
            )
        return space

    @cached_property
    def choices(self) -> tuple[tuple[int, SublayerState], ...]:
        """What may be chosen besides `keep`: (unit, state)."""
        units = range(self._layer_units)
        inside = units[self._per_layer : -self._per_layer]
        others = [state for state in self.states if state != "keep"]
        of_layers = [(unit, state) for unit in units for state in others if state != "skip" or unit in inside]
        return (*of_layers, *((self._layer_units, state) for state in others if state in QUANTISED_STATES))

    @property
    def size(self) -> int:
        """Number of choices."""
        return len(self.choices)

    def mask(self, selection: Collection[int], **fields: Any) -> Mask:
        """The mask that makes the choices in `selection`."""
        taken: list[SublayerState] = ["keep"] * (2 * self.num_layers)
        head: HeadState = "keep"
        for choice in selection:
            unit, state = self.choices[choice]
            if unit < self._layer_units:
                for sublayer in self._sublayers(unit):
                    taken[sublayer] = state
            elif state in ("int8", "int4"):
                head = state
        return Mask.from_states(taken, head=head, **fields)

    def is_complete(self, selection: Collection[int]) -> bool:
        """Whether the mask costs no more than the limit."""
        return self.costs.of(self.mask(selection)) <= self.limit + 1e-9

    def uniform(self) -> Iterator[Selection]:
        """The complete masks one would make by hand: every layer in one quantised state, the LM head in any."""
        for state in self.states:
            layers = [i for i, (unit, other) in enumerate(self.choices) if other == state and unit < self._layer_units]
            heads = [[i] for i, (unit, _) in enumerate(self.choices) if unit == self._layer_units]
            for head in [[], *heads] if state in QUANTISED_STATES else []:
                if self.is_complete([*layers, *head]):
                    yield (*layers, *head)

    def cheapest(self) -> Selection:
        """What saves most at every unit."""
        best: dict[int, int] = {}
        for choice, (unit, _) in enumerate(self.choices):
            if self._savings[choice] > self._savings[best[unit]] if unit in best else self._savings[choice] > 0:
                best[unit] = choice
        return tuple(sorted(best.values()))

    def lightest(self, weights: NDArray[np.float64]) -> Selection:
        """The complete mask whose choices weigh least together (multiple-choice knapsack, by dynamic programming)."""
        needed = float(self._full_cost - self.limit)
        steps = np.minimum(np.floor(self._savings / needed * _STEPS), _STEPS).astype(int)
        least = np.full(_STEPS + 1, np.inf)  # weight by steps saved, all beyond the last as the last
        least[0] = 0
        made: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        for choices in self._by_unit:
            before, least = least, least.copy()
            taken, origin = np.full(_STEPS + 1, -1), np.arange(_STEPS + 1)
            for choice in choices:
                step = int(steps[choice])
                if step <= 0 and weights[choice] >= 0:
                    continue
                step = max(step, 0)
                found = np.full(_STEPS + 1, np.inf)
                found[step:] = before[: _STEPS + 1 - step]
                sources = np.arange(-step, _STEPS + 1 - step)
                sources[-1] = _STEPS - step + int(before[_STEPS - step :].argmin())
                found[-1] = before[sources[-1]]
                found += weights[choice]
                better = found < least
                least[better], taken[better], origin[better] = found[better], choice, sources[better]
            made.append((taken, origin))
        if not np.isfinite(least[-1]):  # a limit so near to the cheapest mask that steps are too coarse
            return self.cheapest()
        at, selection = _STEPS, []
        for taken, origin in reversed(made):
            if taken[at] >= 0:
                selection.append(int(taken[at]))
                at = int(origin[at])
        return tuple(sorted(selection))

    @property
    def _per_layer(self) -> int:
        return 1 if self.granularity == "layer" else 2

    @property
    def _layer_units(self) -> int:
        return self.num_layers * self._per_layer

    @cached_property
    def _by_unit(self) -> list[list[int]]:
        units: dict[int, list[int]] = {}
        for choice, (unit, _) in enumerate(self.choices):
            units.setdefault(unit, []).append(choice)
        return list(units.values())

    @cached_property
    def _full_cost(self) -> float:
        return self.costs.of(self.mask(()))

    @cached_property
    def _savings(self) -> NDArray[np.float64]:
        return np.array([self._full_cost - self.costs.of(self.mask([choice])) for choice in range(self.size)])

    def _sublayers(self, unit: int) -> range:
        return range(2 * unit, 2 * unit + 2) if self.granularity == "layer" else range(unit, unit + 1)
