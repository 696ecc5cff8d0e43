"""The lossless test of a draft (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2).

A drafted token is kept with probability min(1, target / proposal); the first that is not is replaced by a draw from the
normalised residual max(0, target - proposal). Whatever the draft was drawn from, what comes out follows the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from via_sd.runtime.decoding.drafters.protocol import Draft
from via_sd.runtime.decoding.random_stream import Purpose, RandomStream
from via_sd.runtime.decoding.sampling import Processor, draw
from via_sd.runtime.engines.rows import Row


@dataclass(frozen=True)
class Verdict:
    """Outcome of a lossless test.

    Attributes:
        kept: number of drafted tokens kept.
        token: the verifier's own token behind them.
        distributions: the verifier's, of the kept + 1 rows that were tested; empty in greedy decoding.
    """

    kept: int
    token: int
    distributions: list[np.ndarray]


def lossless_test(
    processor: Processor,
    rows: Sequence[Row],
    draft: Draft,
    context: Sequence[int],
    random: RandomStream,
    test: Purpose,
    replace: Purpose,
) -> Verdict:
    """Keep what can be kept of `draft` so that the verifier's distribution is what comes out.

    Args:
        rows: the verifier's, len(draft) + 1; row j follows `context` and j drafted tokens.
        test, replace: key the random numbers of the tests and of the verifier's own token.
    """
    tokens, kept = draft.tokens, 0
    if processor.greedy:
        best = processor.best(rows[0], context)
        while kept < len(tokens) and best == tokens[kept]:
            kept += 1
            best = processor.best(rows[kept], context, tokens[:kept])
        return Verdict(kept, best, [])
    distributions: list[np.ndarray] = []
    while True:
        target = processor.probabilities(rows[kept], context, tokens[:kept])
        distributions.append(target)
        position = len(context) + kept
        if kept == len(tokens):
            break
        token, proposal = tokens[kept], draft.distributions[kept]
        if random.uniform(position, test) >= acceptance(target, proposal, token):
            target = residual(target, proposal, token)
            break
        kept += 1
    return Verdict(kept, draw(target, random.uniform(position, replace)), distributions)


def acceptance(target: np.ndarray, proposal: np.ndarray | None, token: int) -> float:
    """Probability of keeping `token`, drawn from `proposal`, as a draw from `target`.

    A `proposal` of None is a point mass on `token` (a deterministic draft).
    """
    if proposal is None:
        return float(target[token])
    if proposal[token] <= 0:
        return 0.0
    return min(1.0, float(target[token] / proposal[token]))


def residual(target: np.ndarray, proposal: np.ndarray | None, token: int) -> np.ndarray:
    """Probabilities of the token that replaces a rejected one: max(0, target - proposal), normalised."""
    if proposal is None:
        rest = target.copy()
        rest[token] = 0
    else:
        rest = np.maximum(target - proposal, 0)
    total = rest.sum()
    # Where nothing is left the distributions are equal to rounding, and a rejection was itself a rounding artefact.
    return rest / total if total > 0 else target
