"""The mask search of DIMR, Dynamic Intra-Model Routing (paper section 2.4, Eq. 13)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from via_sd.masks.evaluator import Evaluator
from via_sd.masks.ledger import BudgetSpentError, Ledger, Record
from via_sd.masks.mask import Mask
from via_sd.masks.proposals import bayesian_proposals, generator, random_proposals
from via_sd.masks.refinement import refine as refine_masks
from via_sd.masks.space import Granularity, Masks, Space

DEFAULT_SKIP_RATIO = 0.45
DEFAULT_ITERATIONS = 200
DEFAULT_THETA = 5
#: Share of the evaluations that exploration gets when a refinement follows.
_EXPLORATION = 1 / 4
#: Exploration draws a mask that is known already this often before it lets the iteration pass.
_ATTEMPTS = 20
_STAGE = 0  # tells its random streams from those of the refinement


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        mask: the cheapest mask evaluated; its `search` entry says how it was found.
        cost, agreement: of that mask, see `Evaluation`.
        space: what was searched.
        records: every evaluation, in order.
    """

    mask: Mask
    cost: float
    agreement: float
    space: Masks
    records: tuple[Record, ...]


def search(
    evaluator: Evaluator,
    *,
    skip_ratio: float = DEFAULT_SKIP_RATIO,
    granularity: Granularity = "layer",
    iterations: int = DEFAULT_ITERATIONS,
    theta: int = DEFAULT_THETA,
    refine: bool = True,
    seed: int = 0,
    state: Path | None = None,
    resume: bool = False,
    progress: Callable[[Record], None] = lambda _: None,
) -> SearchResult:
    """Find the cheapest mask that skips `round(skip_ratio * layers)` layers, or twice as many sublayers.

    Without `refine` this is the paper's search: every `theta`-th iteration asks Bayesian optimisation for a mask, the
    others draw one at random. With it, that explores for a quarter of the evaluations and the rest go to
    `masks.refinement`. The first and the last layer are always kept. The same arguments and costs give the same mask,
    interrupted or not.

    Args:
        evaluator: says what a mask costs.
        iterations: most evaluations; a mask proposed twice is evaluated once.
        theta: from 1 on; larger than `iterations` leaves Bayesian optimisation out.
        state: file that keeps every evaluation, so that a search can be resumed; none if None.
        resume: go on with the search in `state`, if there is one.
        progress: called after each evaluation, those read from `state` included.

    Raises:
        ValueError: a ratio that does not fit the model, or `iterations` or `theta` below 1.
        MaskError: `state` holds another search, or an unfinished one and no `resume`; or optuna is not installed.
    """
    if iterations < 1 or theta < 1:
        raise ValueError(f"iterations and theta are {iterations} and {theta}, wanted 1 or more")
    space = Space.of(evaluator.num_layers, skip_ratio, granularity)
    settings = {
        "skip_ratio": skip_ratio,
        "granularity": granularity,
        "iterations": iterations,
        "theta": theta,
        "refine": refine,
        "seed": seed,
    }
    ledger = Ledger(evaluator, space, iterations, settings, path=state, resume=resume, progress=progress)
    finished = False
    try:
        explore = max(1, int(iterations * _EXPLORATION)) if refine else iterations
        for iteration in range(1, explore + 1):
            _explore(ledger, space, seed, iteration, bayesian=iteration % theta == 0)
        if refine:
            refine_masks(ledger, space, seed)
        finished = True
    except BudgetSpentError:
        finished = True
    finally:
        ledger.close(finished=finished)
    return result_of(ledger, evaluator, settings)


def result_of(ledger: Ledger, evaluator: Evaluator, settings: Mapping[str, Any]) -> SearchResult:
    """The best mask in a ledger, with how it was found."""
    best = ledger.best()
    found = {
        **settings,
        "evaluations": len(ledger.records),
        "cost": best.cost,
        "agreement": best.agreement,
        "costs_of": dict(evaluator.identity),
    }
    mask = ledger.space.mask(best.selection, search=found)
    return SearchResult(mask, best.cost, best.agreement, ledger.space, tuple(ledger.records))


def _explore(ledger: Ledger, space: Space, seed: int, iteration: int, *, bayesian: bool) -> None:
    """One iteration of the paper's search."""
    random = generator(seed, _STAGE, iteration)
    known = ledger.complete()
    if bayesian and known:
        kind, proposals = "bayes", bayesian_proposals(space, known, random)
    else:
        kind, proposals = "random", random_proposals(space, random)
    for proposal in islice(proposals, _ATTEMPTS):
        if not ledger.knows(proposal):
            ledger.cost(proposal, kind)
            return
