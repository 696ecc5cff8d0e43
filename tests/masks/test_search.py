"""The mask search: the paper's method, its refinement, and what a kill leaves of it."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from via_sd.masks import Evaluation, Mask, MaskError, Record, SearchResult, Space, search

pytest.importorskip("optuna", reason="needs the search extra")

LAYERS = 24
#: Layers that cost nearly nothing: unevenly placed, side by side and alone.
REDUNDANT = (3, 4, 5, 9, 10, 14, 17, 18, 19, 21)
RATIO = len(REDUNDANT) / LAYERS


class Analytic:
    """A model whose layers add up, a little worse than linearly, as those of real ones do."""

    def __init__(self, layers: int = LAYERS, redundant: Collection[int] = REDUNDANT) -> None:
        self.num_layers = layers
        self.identity: dict[str, Any] = {"model": "analytic", "redundant": list(redundant)}
        self.masks: list[Mask] = []
        costs = np.random.default_rng(5).uniform(0.05, 0.8, 2 * layers)
        for layer in redundant:
            costs[2 * layer : 2 * layer + 2] = 0.004
        self._costs = costs

    def evaluate(self, mask: Mask) -> Evaluation:
        self.masks.append(mask)
        total = float(self._costs[~np.array(mask.sublayers)].sum())
        return Evaluation(total + total**2, float(np.exp(-total)))


def skipped(mask: Mask) -> list[int]:
    return [layer for layer, keep in enumerate(mask.keep_mlp) if not keep]


@functools.cache
def uninterrupted(refine: bool = True) -> SearchResult:
    """A search that several tests interrupt and compare with."""
    return search(Analytic(), skip_ratio=RATIO, iterations=80, refine=refine)


@pytest.mark.parametrize("seed", range(5))
def test_the_redundant_layers_are_found_from_every_seed(seed: int) -> None:
    result = search(Analytic(), skip_ratio=RATIO, iterations=120, seed=seed)
    assert skipped(result.mask) == list(REDUNDANT)
    assert len(result.records) <= 120


def test_redundant_sublayers_are_found_one_by_one() -> None:
    model = Analytic(12, ())
    redundant = [5, 8, 9, 14, 16, 19]
    model._costs[redundant] = 0.004
    result = search(model, skip_ratio=0.25, granularity="sublayer", iterations=120)
    assert [i for i, keep in enumerate(result.mask.sublayers) if not keep] == redundant


def test_with_equal_evaluations_refinement_beats_the_papers_search_and_that_beats_chance() -> None:
    refined = search(Analytic(), skip_ratio=RATIO, iterations=120)
    paper = search(Analytic(), skip_ratio=RATIO, iterations=120, refine=False)
    random = search(Analytic(), skip_ratio=RATIO, iterations=120, refine=False, theta=1000)
    assert refined.cost < 0.2 * paper.cost
    assert paper.cost < random.cost


def test_without_refinement_every_theta_th_iteration_is_bayesian_and_all_others_random() -> None:
    result = search(Analytic(), skip_ratio=RATIO, iterations=30, theta=6, refine=False)
    kinds = [record.kind for record in result.records]
    assert kinds == ["bayes" if iteration % 6 == 0 else "random" for iteration in range(1, 31)]
    assert {len(record.selection) for record in result.records} == {len(REDUNDANT)}


def test_bayesian_optimisation_finds_better_masks_than_chance() -> None:
    result = search(Analytic(), skip_ratio=RATIO, iterations=60, theta=2, refine=False)
    later = {kind: [r.cost for r in result.records[30:] if r.kind == kind] for kind in ("random", "bayes")}
    assert np.median(later["bayes"]) < 0.6 * np.median(later["random"])


@pytest.mark.parametrize("refine", [True, False])
@pytest.mark.parametrize(("granularity", "flags"), [("layer", 2), ("sublayer", 1)])
def test_every_mask_keeps_the_first_and_last_layer_and_all_but_probes_skip_the_budget(
    granularity: Any, flags: int, refine: bool
) -> None:
    model = Analytic()
    result = search(model, skip_ratio=0.25, granularity=granularity, iterations=70, refine=refine)
    for mask, record in zip(model.masks, result.records, strict=True):
        assert mask.sublayers[:2] == mask.sublayers[-2:] == (True, True)
        assert mask.sublayers.count(False) == (flags if record.kind == "probe" else 12)
    assert len({mask.sublayers for mask in model.masks}) == len(model.masks)
    assert result.mask.sublayers.count(False) == 12


def test_a_space_that_is_smaller_than_the_budget_of_evaluations_is_searched_whole() -> None:
    model = Analytic(7, (3, 4))
    result = search(model, skip_ratio=0.3, iterations=200)
    assert skipped(result.mask) == [3, 4]
    assert sum(len(record.selection) == 2 for record in result.records) == 10


def test_the_result_is_the_cheapest_mask_and_says_how_it_was_found() -> None:
    result = search(Analytic(), skip_ratio=RATIO, iterations=40, seed=3)
    cheapest = min((r for r in result.records if len(r.selection) == len(REDUNDANT)), key=lambda record: record.cost)
    assert (result.cost, result.agreement) == (cheapest.cost, cheapest.agreement)
    assert result.mask == Space.of(LAYERS, RATIO, "layer").mask(cheapest.selection)
    assert result.mask.search == {
        "skip_ratio": RATIO,
        "granularity": "layer",
        "iterations": 40,
        "theta": 5,
        "refine": True,
        "seed": 3,
        "evaluations": 40,
        "cost": result.cost,
        "agreement": result.agreement,
        "costs_of": Analytic().identity,
    }


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"skip_ratio": 0.0}, "skip ratio"),
        ({"skip_ratio": 0.99}, "first and the last layer are kept"),
        ({"granularity": "head"}, "wanted layer or sublayer"),
        ({"iterations": 0}, "wanted 1 or more"),
        ({"theta": 0}, "wanted 1 or more"),
    ],
)
def test_what_cannot_be_searched_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        search(Analytic(), **options)


# -- interrupted -----------------------------------------------------------------------------------------------------


class Interrupted(Analytic):
    """Dies at an evaluation."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after

    def evaluate(self, mask: Mask) -> Evaluation:
        if len(self.masks) == self._after:
            raise KeyboardInterrupt
        return super().evaluate(mask)


@pytest.mark.parametrize("refine", [True, False])
@pytest.mark.parametrize("after", [3, 31, 70])
def test_a_search_that_is_resumed_ends_as_one_that_was_not_interrupted(
    tmp_path: Path, after: int, refine: bool
) -> None:
    whole = uninterrupted(refine)
    state = tmp_path / "state.jsonl"
    with pytest.raises(KeyboardInterrupt):
        search(Interrupted(after), skip_ratio=RATIO, iterations=80, refine=refine, state=state)
    rest = Analytic()
    told: list[Record] = []
    resumed = search(
        rest, skip_ratio=RATIO, iterations=80, refine=refine, state=state, resume=True, progress=told.append
    )
    assert len(rest.masks) == 80 - after
    assert tuple(told) == resumed.records == whole.records
    assert resumed.mask == whole.mask


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.masks.test_search import Analytic, RATIO
from via_sd.masks import search

class Killed(Analytic):
    def evaluate(self, mask):
        if len(self.masks) == 33:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().evaluate(mask)

search(Killed(), skip_ratio=RATIO, iterations=80, state=Path(sys.argv[1]))
"""


def test_a_search_that_was_killed_is_resumed_even_with_half_a_line_written(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    root = Path(__file__).parents[2]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(state)], check=False, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert killed.returncode == -signal.SIGKILL
    with state.open("a", encoding="utf-8") as file:
        file.write('{"kind": "random", "skip')
    rest = Analytic()
    resumed = search(rest, skip_ratio=RATIO, iterations=80, state=state, resume=True)
    assert len(rest.masks) == 80 - 33
    assert resumed.records == uninterrupted().records


def test_an_unfinished_search_is_not_overwritten_by_a_new_one(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    with pytest.raises(KeyboardInterrupt):
        search(Interrupted(5), skip_ratio=RATIO, iterations=30, state=state)
    before = state.read_bytes()
    with pytest.raises(MaskError, match=r"unfinished search \(5 evaluations\): continue with --resume"):
        search(Analytic(), skip_ratio=RATIO, iterations=30, state=state)
    assert state.read_bytes() == before
    search(Analytic(), skip_ratio=RATIO, iterations=30, state=state, resume=True)
    again = search(Analytic(), skip_ratio=RATIO, iterations=20, state=state)
    assert len(again.records) == 20


def test_a_finished_search_resumed_evaluates_nothing(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    first = search(Analytic(), skip_ratio=RATIO, iterations=30, state=state)
    model = Analytic()
    assert search(model, skip_ratio=RATIO, iterations=30, state=state, resume=True).records == first.records
    assert model.masks == []


@pytest.mark.parametrize(
    ("options", "redundant", "says"),
    [({"seed": 1}, REDUNDANT, "seed was 0 and is 1"), ({}, (3, 4), "redundant was")],
)
def test_a_search_is_not_resumed_with_other_settings_or_costs(
    tmp_path: Path, options: dict[str, Any], redundant: tuple[int, ...], says: str
) -> None:
    state = tmp_path / "state.jsonl"
    search(Analytic(), skip_ratio=RATIO, iterations=20, state=state)
    with pytest.raises(MaskError, match=says):
        search(Analytic(redundant=redundant), skip_ratio=RATIO, iterations=20, state=state, resume=True, **options)


def test_the_state_is_plain_json_lines_and_a_file_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    result = search(Analytic(), skip_ratio=RATIO, iterations=10, state=state)
    header, *lines = [json.loads(line) for line in state.read_text(encoding="utf-8").splitlines()]
    assert header["costs_of"] == Analytic().identity
    assert [line["cost"] for line in lines[:-1]] == [record.cost for record in result.records]
    other = tmp_path / "prompts.jsonl"
    other.write_text('{"prompt": "hello"}\n', encoding="utf-8")
    with pytest.raises(MaskError, match="not the ledger of a search"):
        search(Analytic(), skip_ratio=RATIO, iterations=10, state=other)
    assert other.read_text(encoding="utf-8") == '{"prompt": "hello"}\n'
