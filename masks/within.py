"""The search of a mask that costs at most so much time: states for all sublayers, layers left out among them.

Masks that one would make by hand are evaluated first, then every choice alone: how sensitive the model is to it. From
there on a linear model of what choices add to a mask's cost is asked for the mask that does least harm within the cost,
again and again: drawn from its uncertainty (Thompson sampling), and with a preference of random strength for what the
best mask so far does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from via_sd.masks.evaluator import Evaluator
from via_sd.masks.ledger import BudgetSpentError, Ledger, Record
from via_sd.masks.proposals import generator
from via_sd.masks.search import DEFAULT_ITERATIONS, SearchResult, result_of
from via_sd.masks.space import Granularity, Selection
from via_sd.masks.state_space import SEARCHED_STATES, StateSpace
from via_sd.masks.step_costs import StepCosts
from via_sd.masks.surrogate import Surrogate

_STAGE = 2  # tells its random streams from those of the search by skip ratio
#: How far proposals stray from what the model thinks best, and how much further with each one that is known already.
_WIDTH, _WIDER = 0.3, 0.075
_ATTEMPTS = 40
#: Share of proposals that keep near to the best mask.
_NEAR = 0.5


def search_within(
    evaluator: Evaluator,
    cost: float,
    costs: StepCosts,
    *,
    states: Sequence[str] = SEARCHED_STATES,
    granularity: Granularity = "layer",
    iterations: int = DEFAULT_ITERATIONS,
    seed: int = 0,
    state: Path | None = None,
    resume: bool = False,
    progress: Callable[[Record], None] = lambda _: None,
) -> SearchResult:
    """Find the mask nearest to full whose decoding step takes at most `cost` of a step of full.

    It is at least as near, by the evaluator's measure, as any mask with all layers in one quantised state and the LM
    head in any, if that costs no more. The same arguments and evaluations give the same mask, interrupted or not.

    Args:
        evaluator: says how far a mask is from full.
        cost: share of a step of full, between 0 and 1.
        costs: what states cost, as measured.
        states: those a sublayer may be in.
        granularity: what changes its state whole.
        iterations: most evaluations; each choice of a unit and a state is evaluated alone first.
        state, resume, progress: see `search`.

    Raises:
        ValueError: states or a cost that do not go together, or fewer iterations than choices.
        MaskError: `state` holds another search, or an unfinished one and no `resume`.
    """
    space = StateSpace.of(evaluator.num_layers, granularity, states, costs, cost)
    uniform = list(space.uniform())
    least = len(uniform) + space.size + 1
    if iterations < least:
        raise ValueError(
            f"iterations is {iterations}, wanted {least} or more: each state of each {granularity} is evaluated alone "
            "before states are combined"
        )
    settings = {
        "cost_limit": cost,
        "states": list(space.states),
        "step_costs": costs.to_json(),
        "granularity": granularity,
        "iterations": iterations,
        "seed": seed,
    }
    ledger = Ledger(evaluator, space, iterations, settings, path=state, resume=resume, progress=progress)
    finished = False
    try:
        for selection in uniform:
            ledger.cost(selection, "uniform")
        alone = np.array([ledger.cost([choice], "probe") for choice in range(space.size)])
        ledger.cost(space.lightest(alone), "refine")
        _refine(ledger, space, alone, seed)
        finished = True
    except BudgetSpentError:
        finished = True
    finally:
        ledger.close(finished=finished)
    return result_of(ledger, evaluator, settings)


def _refine(ledger: Ledger, space: StateSpace, alone: NDArray[np.float64], seed: int) -> None:
    """Spend what is left of the ledger's evaluations; ends early when everything likely has been tried."""
    step = 0
    while True:
        step += 1
        random = generator(seed, _STAGE, step)
        surrogate = Surrogate.of_costs(ledger.complete(), alone)
        best = ledger.best().selection
        for attempt in range(_ATTEMPTS):
            weights = surrogate.draw(random, _WIDTH + _WIDER * attempt)
            if random.random() < _NEAR:
                weights = _pulled(weights, best, random.random())
            proposal = space.lightest(weights)
            if not ledger.knows(proposal):
                break
        else:
            return
        ledger.cost(proposal, "refine")


def _pulled(weights: NDArray[np.float64], best: Selection, strength: float) -> NDArray[np.float64]:
    """`weights` with the choices of `best` lighter, and all others heavier, by `strength` times what they weigh."""
    towards = np.ones(len(weights))
    towards[list(best)] = -1
    pulled: NDArray[np.float64] = weights + strength * np.abs(weights) * towards
    return pulled
