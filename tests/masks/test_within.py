"""The search within a cost: states for all sublayers and the LM head, by what they cost and how sensitive they are."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from via_sd.masks import Evaluation, Mask, MaskError, StateSpace, StepCosts, search_within

LAYERS = 10
#: Of a step of full: ten layers of 0.03 and 0.06, 0.06 of the LM head and 0.04 of everything else.
COSTS = StepCosts(
    attention={"keep": 0.03, "int8": 0.015, "int4": 0.01, "skip": 0.0},
    mlp={"keep": 0.06, "int8": 0.025, "int4": 0.015, "skip": 0.0},
    head={"keep": 0.0, "int8": -0.03, "int4": -0.04},
    rest=0.1,
)
#: Two layers that may be left out, three that bear 4 bits; all others do not.
REDUNDANT, ROBUST = (3, 6), (2, 4, 8)


class Analytic:
    """A model in which the harm of states adds up."""

    num_layers = LAYERS

    def __init__(self) -> None:
        self.identity: dict[str, Any] = {"model": "analytic"}
        self.evaluated: list[Mask] = []

    def evaluate(self, mask: Mask) -> Evaluation:
        self.evaluated.append(mask)
        harm = {"keep": 0.0, "int8": 0.002, "int4": 0.2, "skip": 2.0}
        total = {"keep": 0.0, "int8": 0.003, "int4": 0.5}[mask.head]
        for index, state in enumerate(mask.states):
            layer = index // 2
            small = (state == "skip" and layer in REDUNDANT) or (state == "int4" and layer in ROBUST)
            total += 0.004 if small else harm[state]
        return Evaluation(total, float(np.exp(-total)))


def best_by_hand(limit: float) -> Mask:
    """What the model above bears best: redundant layers out, robust ones in 4 bits, all others and the head in 8."""
    states = ["skip" if i in REDUNDANT else "int4" if i in ROBUST else "int8" for i in range(LAYERS)]
    mask = Mask.from_states([state for state in states for _ in "am"], head="int8")
    assert COSTS.of(mask) <= limit
    return mask


def test_a_step_of_full_costs_one_and_every_other_mask_what_its_states_save() -> None:
    full = Mask.from_layers([True] * LAYERS)
    assert COSTS.of(full) == pytest.approx(1)
    assert COSTS.of(full.in_precision("int8")) == pytest.approx(0.1 + 10 * 0.04 - 0.03)
    assert COSTS.of(Mask.from_flags([True] * LAYERS, [False] * LAYERS)) == pytest.approx(0.4)
    assert StepCosts.from_json(json.loads(json.dumps(COSTS.to_json()))) == COSTS
    with pytest.raises(MaskError, match="no cost of the states bridge"):
        COSTS.of(Mask.from_states(["bridge"] * 2 + ["keep"] * (2 * LAYERS - 2)))


@pytest.mark.parametrize("granularity", ["layer", "sublayer"])
def test_the_mask_found_costs_no_more_than_asked_and_harms_no_more_than_any_made_by_hand(granularity: Any) -> None:
    model = Analytic()
    result = search_within(model, 0.45, COSTS, granularity=granularity, iterations=150)
    assert COSTS.of(result.mask) <= 0.45
    assert result.cost <= model.evaluate(best_by_hand(0.45)).cost
    for state, head in itertools.product(("int8", "int4"), ("keep", "int8", "int4")):
        made = Mask.from_states([state] * (2 * LAYERS), head=head)
        if COSTS.of(made) <= 0.45:
            assert result.cost <= model.evaluate(made).cost
    assert {result.mask.states[i] for i in (0, 1, -2, -1)}.isdisjoint({"skip"})


def test_states_that_are_not_allowed_are_not_used() -> None:
    result = search_within(Analytic(), 0.6, COSTS, states=["keep", "skip"], iterations=60)
    assert {*result.mask.states, result.mask.head} == {"keep", "skip"}
    quantised = search_within(Analytic(), 0.6, COSTS, states=["keep", "int8"], iterations=60)
    assert {*quantised.mask.states, quantised.mask.head} == {"keep", "int8"}
    assert quantised.cost < result.cost


def test_the_same_search_finds_the_same_mask_interrupted_or_not(tmp_path: Path) -> None:
    whole = search_within(Analytic(), 0.45, COSTS, iterations=90, state=tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_text().splitlines()
    (tmp_path / "cut.jsonl").write_text("".join(f"{line}\n" for line in lines[:60]) + lines[60][:15])
    model = Analytic()
    resumed = search_within(model, 0.45, COSTS, iterations=90, state=tmp_path / "cut.jsonl", resume=True)
    assert (resumed.mask, resumed.records) == (whole.mask, whole.records)
    assert len(model.evaluated) == len(whole.records) - 59
    assert (tmp_path / "cut.jsonl").read_text().splitlines() == lines
    with pytest.raises(MaskError, match=r"cost_limit was 0\.45 and is 0\.5"):
        search_within(Analytic(), 0.5, COSTS, iterations=90, state=tmp_path / "cut.jsonl", resume=True)


@pytest.mark.parametrize(
    ("cost", "states", "iterations", "message"),
    [
        (0.05, ("keep", "int8"), 90, "the cheapest costs 0.4"),
        (1.5, ("keep", "int8"), 90, "between 0 and 1"),
        (0.5, ("keep",), 90, "one besides keep"),
        (0.5, ("keep", "int2"), 90, "wanted some of keep, skip, int8, int4"),
        (0.5, ("keep", "bridge"), 90, "wanted some of keep, skip, int8, int4"),
        (0.5, ("int8", "int8"), 90, "each once"),
        (0.5, ("keep", "int8", "int4"), 20, "evaluated alone"),
    ],
)
def test_what_does_not_go_together_is_refused(cost: float, states: Any, iterations: int, message: str) -> None:
    model = Analytic()
    with pytest.raises(ValueError, match=message):
        search_within(model, cost, COSTS, states=states, iterations=iterations)
    assert not model.evaluated


def brute_force(space: StateSpace, weights: Sequence[float]) -> float:
    """Least weight of a complete mask, by trying all."""
    by_unit: dict[int, list[int]] = {}
    for choice, (unit, _) in enumerate(space.choices):
        by_unit.setdefault(unit, []).append(choice)
    masks = itertools.product(*([None, *choices] for choices in by_unit.values()))
    selections = ([choice for choice in mask if choice is not None] for mask in masks)
    return min(sum(weights[c] for c in chosen) for chosen in selections if space.is_complete(chosen))


@settings(deadline=None, max_examples=40)
@given(data=st.data(), limit=st.sampled_from([0.4, 0.5, 0.7, 0.95]), granularity=st.sampled_from(["layer", "sublayer"]))
def test_the_lightest_mask_within_a_cost_is_the_lightest_of_all(data: Any, limit: float, granularity: Any) -> None:
    layers = 4 if granularity == "layer" else 2
    share = 0.9 / layers / 0.09
    costs = StepCosts(
        {state: share * cost for state, cost in COSTS.attention.items()},
        {state: share * cost for state, cost in COSTS.mlp.items()},
        COSTS.head,
        0.1,
    )
    space = StateSpace.of(layers, granularity, ("keep", "skip", "int8", "int4"), costs, limit)
    weights = np.array(data.draw(st.lists(st.floats(-0.2, 1), min_size=space.size, max_size=space.size)))
    found = space.lightest(weights)
    assert space.is_complete(found)
    units = [space.choices[choice][0] for choice in found]
    assert len(set(units)) == len(units)
    # Savings are counted in steps of 1/2000, rounded down: only a mask at the very edge is missed.
    assert sum(weights[list(found)]) <= brute_force(space, weights.tolist()) + 1e-9 or _at_the_edge(space, weights)


def _at_the_edge(space: StateSpace, weights: Any) -> bool:
    """Whether the best mask saves hardly more than has to be saved."""
    tighter = StateSpace(space.num_layers, space.granularity, space.states, space.costs, space.limit - 0.005)
    return bool(sum(weights[list(space.lightest(weights))]) <= brute_force(tighter, weights.tolist()) + 1e-9)
