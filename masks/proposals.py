"""Where a search looks next when it follows the paper (Eq. 13): at random, or where Bayesian optimisation points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

from via_sd.errors import MaskError
from via_sd.masks.ledger import Record
from via_sd.masks.space import Selection, Space

#: Suggestions that the optimiser is asked for; the units it names most often are skipped.
_VOTES = 8
#: Values the optimiser compares for a unit in each suggestion: few, so that suggestions differ.
_CANDIDATES = 4


def generator(seed: int, *where: int) -> np.random.Generator:
    """The random stream of one step of a search: it depends on the step alone, so that a resumed search repeats it."""
    return np.random.default_rng((seed, *where))


def random_proposals(space: Space, random: np.random.Generator) -> Iterator[Selection]:
    """Masks of the space, all equally likely, without end."""
    while True:
        yield most_wanted(random.random(space.size), space.budget)


def bayesian_proposals(space: Space, records: Sequence[Record], random: np.random.Generator) -> Iterator[Selection]:
    """Masks that the costs so far speak for, by a tree-structured Parzen estimator (optuna's), without end.

    The estimator has one choice per unit and knows of no budget, so it is asked several times and the units it skips
    most often are skipped; chance decides between equals, and has more and more of a say in every further proposal.

    Args:
        records: evaluations that skip the whole budget.

    Raises:
        MaskError: optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise MaskError("the mask search needs optuna: pip install 'via-sd-export[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    choices = {str(unit): optuna.distributions.CategoricalDistribution([0, 1]) for unit in range(space.size)}
    sampler = optuna.samplers.TPESampler(
        n_startup_trials=0,
        n_ei_candidates=_CANDIDATES,
        multivariate=False,
        constant_liar=False,
        seed=int(random.integers(1 << 31)),
    )
    study = optuna.create_study(sampler=sampler)
    for record in records:
        skipped = {str(unit): int(unit in record.selection) for unit in range(space.size)}
        study.add_trial(optuna.trial.create_trial(params=skipped, distributions=choices, value=record.cost))
    votes = np.zeros(space.size)
    for _ in range(_VOTES):
        suggestion = study.ask(choices)
        votes += [suggestion.params[str(unit)] for unit in range(space.size)]
    for attempt in count(1):
        yield most_wanted(votes + attempt * random.random(space.size), space.budget)


def most_wanted(scores: NDArray[np.float64], budget: int) -> Selection:
    """The `budget` units with the highest scores."""
    return tuple(sorted(np.argsort(-scores, kind="stable")[:budget].tolist()))
