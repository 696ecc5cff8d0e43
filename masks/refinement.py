"""Local refinement: from what exploration found to a mask that no likely swap improves.

Every unit is first skipped alone, if the budget of evaluations has room for that: these marginal costs rank the units
well, and cost little, as all of a candidate's layers before its only skip are shared. Then a linear model of the costs
so far is asked, again and again, either which units of the best mask to swap for which others or for a whole mask; its
uncertainty makes the proposals differ (Thompson sampling).
"""

from __future__ import annotations

import numpy as np

from via_sd.masks.ledger import Ledger
from via_sd.masks.proposals import generator, most_wanted
from via_sd.masks.space import Selection, Space
from via_sd.masks.surrogate import Surrogate, Vector, standardised_log

_STAGE = 1  # tells the random streams of the refinement from those of the exploration
#: How far proposals stray from what the model thinks best, and how much further with each one that is known already.
_WIDTH, _WIDER = 0.3, 0.075
_ATTEMPTS = 40
#: Shares of proposals that are swaps in the best mask, and of these, that swap one unit rather than two.
_SWAPS, _SINGLE_SWAPS = 0.5, 0.6


def refine(ledger: Ledger, space: Space, seed: int) -> None:
    """Spend what is left of the ledger's evaluations; ends early when everything likely has been tried.

    Raises:
        BudgetSpentError: no evaluation is left.
    """
    marginal = _marginal_costs(ledger) if space.size < ledger.left else None
    if marginal is not None:
        ledger.cost(most_wanted(-marginal, space.budget), "refine")
    step = 0
    while True:
        step += 1
        random = generator(seed, _STAGE, step)
        surrogate = Surrogate.of_log_costs(ledger.complete(), space.size, marginal)
        best = ledger.best().selection
        for attempt in range(_ATTEMPTS):
            weights = surrogate.draw(random, _WIDTH + _WIDER * attempt)
            proposal = (
                _swapped(best, weights, random) if random.random() < _SWAPS else most_wanted(-weights, space.budget)
            )
            if not ledger.knows(proposal):
                break
        else:
            return
        ledger.cost(proposal, "refine")


def _marginal_costs(ledger: Ledger) -> Vector:
    """Standardised log cost of skipping each unit alone."""
    return standardised_log([ledger.cost([unit], "probe") for unit in range(ledger.space.size)])


def _swapped(selection: Selection, weights: Vector, random: np.random.Generator) -> Selection:
    """`selection` with its one or two heaviest units swapped for the lightest of the others."""
    inside = np.array(selection)
    outside = np.setdiff1d(np.arange(len(weights)), inside)
    count = 1 if random.random() < _SINGLE_SWAPS else 2
    left = inside[np.argsort(weights[inside], kind="stable")][: max(len(inside) - count, 0)]
    entering = outside[np.argsort(weights[outside], kind="stable")][: len(inside) - len(left)]
    return tuple(sorted([*left.tolist(), *entering.tolist()]))
