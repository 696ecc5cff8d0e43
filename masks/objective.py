"""What a mask costs: how far the slim-verifier q' is from the full verifier q at each position (paper Eq. 11-12).

Every objective is a function of two arrays of log-probabilities and stands behind a name. The paper's own is `via` as
public reimplementations state it; the sign inside its second term could not be checked against the paper, so the same
with that sign turned (`via-flipped`) and the forward Kullback-Leibler divergence (`kl`) are here as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
#: (log q, log q'), both [positions, vocab] in nats -> cost of each position in nats, float64 [positions].
Objective = Callable[[Array, Array], NDArray[np.float64]]

DEFAULT_ALPHA = 0.5
DEFAULT_BETA = 0.3
#: Elements worked on at a time: a few buffers of this size stay in a core's cache.
_BLOCK = 1 << 18


def via_cost(
    log_full: Array, log_slim: Array, *, alpha: float = DEFAULT_ALPHA, beta: float = DEFAULT_BETA
) -> NDArray[np.float64]:
    """The mask objective R(q||q') (paper Eq. 11-12), per position.

    With z1 = log(1-alpha) + log q' - log q and z2 = log(beta) + log q' - log q, the sum over the vocabulary of
    `q' relu(z1) + q relu(z2)`: tokens to which slim gives far more than full does. Zero at q' = q.

    Args:
        log_full, log_slim: log q and log q' in nats, [positions, vocab], -inf allowed; narrower than float32 is
            widened to it.
        alpha: 0 <= alpha < 1, how far above q a token's q' may be before it costs in proportion to q'.
        beta: 0 < beta <= 1, likewise in proportion to q.

    Returns:
        R in nats, float64 [positions]; inf where q' > 0 = q.

    Raises:
        ValueError: alpha or beta outside their domain, or arrays that do not match.
    """
    return _via(log_full, log_slim, alpha, beta, flipped=False)


def flipped_via_cost(
    log_full: Array, log_slim: Array, *, alpha: float = DEFAULT_ALPHA, beta: float = DEFAULT_BETA
) -> NDArray[np.float64]:
    """`via_cost` with z2 = log(beta) + log q - log q': tokens that slim misses cost as well as those it makes up.

    inf also where q > 0 = q'.
    """
    return _via(log_full, log_slim, alpha, beta, flipped=True)


def forward_kl(log_full: Array, log_slim: Array) -> NDArray[np.float64]:
    """KL(q||q') in nats per position; arguments as for `via_cost`. inf where q > 0 = q'."""
    costs = np.empty(_checked(log_full, log_slim))
    for rows, full, slim in _blocks(log_full, log_slim):
        probability = np.exp(full)
        with np.errstate(invalid="ignore"):
            ratio = np.subtract(full, slim, out=slim)
            # A sum of products of which q = 0 takes no part; 0 * inf is the only way to a NaN here.
            terms = np.multiply(probability, ratio, out=ratio)
        if np.isneginf(full.min()):
            terms[probability == 0] = 0
        costs[rows] = terms.sum(-1, dtype=np.float64)
    return costs


OBJECTIVES: Mapping[str, Callable[..., NDArray[np.float64]]] = {
    "via": via_cost,
    "via-flipped": flipped_via_cost,
    "kl": forward_kl,
}
DEFAULT_OBJECTIVE = "via"


def objective_by_name(name: str, *, alpha: float = DEFAULT_ALPHA, beta: float = DEFAULT_BETA) -> Objective:
    """The objective called `name`, with its parameters fixed (`kl` has none).

    Raises:
        ValueError: no objective of that name, or alpha or beta outside their domain.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"no objective is called {name!r}; choose one of {', '.join(OBJECTIVES)}")
    _check_domain(alpha, beta)
    chosen = OBJECTIVES[name]
    return chosen if name == "kl" else partial(chosen, alpha=alpha, beta=beta)


def _via(log_full: Array, log_slim: Array, alpha: float, beta: float, *, flipped: bool) -> NDArray[np.float64]:
    _check_domain(alpha, beta)
    shift1, shift2 = math.log1p(-alpha), math.log(beta)
    costs = np.empty(_checked(log_full, log_slim))
    for rows, full, slim in _blocks(log_full, log_slim):
        with np.errstate(invalid="ignore"):
            ratio = slim - full
            # fmax takes zero for NaN, which is right: both probabilities are zero there.
            excess = np.fmax(ratio + shift1, 0)
            np.multiply(np.exp(slim, out=slim), excess, out=excess)
            if np.isnan(excess.max()):  # q' = 0 against an infinite ratio
                excess[slim == 0] = 0
            if flipped:
                np.negative(ratio, out=ratio)
            ratio += shift2
            shortfall = np.fmax(ratio, 0, out=ratio)
            np.multiply(np.exp(full, out=full), shortfall, out=shortfall)
            if np.isnan(shortfall.max()):  # q = 0 against an infinite ratio
                shortfall[full == 0] = 0
        costs[rows] = excess.sum(-1, dtype=np.float64) + shortfall.sum(-1, dtype=np.float64)
    return costs


def _check_domain(alpha: float, beta: float) -> None:
    if not 0 <= alpha < 1:
        raise ValueError(f"alpha is {alpha}, wanted 0 <= alpha < 1")
    if not 0 < beta <= 1:
        raise ValueError(f"beta is {beta}, wanted 0 < beta <= 1")


def _checked(log_full: Array, log_slim: Array) -> int:
    """The number of positions; raises `ValueError` unless both are [positions, vocab] of the same shape."""
    if log_full.ndim != 2 or log_full.shape != log_slim.shape:
        raise ValueError(
            f"log-probabilities have shapes {log_full.shape} and {log_slim.shape}, wanted the same [positions, vocab]"
        )
    return len(log_full)


def _blocks(log_full: Array, log_slim: Array) -> Iterator[tuple[slice, Array, Array]]:
    """Blocks of rows, as copies that may be written to, in float32 or wider."""
    dtype = np.result_type(log_full, log_slim, np.float32)
    step = max(1, _BLOCK // max(1, log_full.shape[1]))
    for start in range(0, len(log_full), step):
        rows = slice(start, start + step)
        yield rows, log_full[rows].astype(dtype), log_slim[rows].astype(dtype)
