"""Time of a pass over S tokens in every tier, measured in turn so that a drifting machine meets all alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from via_sd.contract.graphs import DRAFTER, FULL
from via_sd.runtime import Bundle
from via_sd.runtime.engines.protocol import Engine

SIZES = (1, 2, 4, 8, 16, 32)
#: The first passes of a size compile, allocate and capture.
_WARM_UP = 3


def step_times(
    engine: Engine, *, sizes: Sequence[int] = SIZES, cached: int = 256, repeats: int = 20
) -> dict[str, dict[int, float]]:
    """Median milliseconds of a pass with `cached` tokens in the buffers (fewer where they hold fewer).

    Every token of a pass gets a row, as in a pass that verifies a block.

    Returns:
        tier -> tokens of the pass -> milliseconds.
    """
    cached = min(cached, engine.max_seq_len - max(sizes))
    buffers = engine.new_buffers()
    buffers.forward(engine.tiers[0], [0] * cached, 0, 1)
    samples: dict[tuple[str, int], list[float]] = {(tier, size): [] for tier in engine.tiers for size in sizes}
    for _ in range(_WARM_UP + repeats):
        for (tier, size), taken in samples.items():
            start = perf_counter()
            buffers.forward(tier, [0] * size, cached, size)
            taken.append(1e3 * (perf_counter() - start))
    return {tier: {size: median(samples[tier, size][_WARM_UP:]) for size in sizes} for tier in engine.tiers}


@dataclass(frozen=True)
class Costs:
    """Forward pass latency on this machine.

    Attributes:
        step_ms: tier -> tokens of a pass -> milliseconds; a model drafter's are under `drafter`.
        full, slim, draft: as in `Policy`.
    """

    step_ms: dict[str, dict[int, float]]
    full: dict[int, float]
    slim: dict[int, float] | None
    draft: float | None


def measure_costs(bundle: Bundle, verifier: Engine, drafter: Engine | None) -> Costs:
    """Time the passes of every tier of `verifier`, and of a model drafter."""
    times = step_times(verifier)
    full, described = times[FULL], bundle.manifest["drafter"]
    slim = draft = None
    if bundle.slim is not None:
        slim = {size: ms / full[1] for size, ms in times[bundle.slim].items()}
    if described["kind"] == "mask":
        draft = times[described["tier"]][1] / full[1]
    elif drafter is not None:
        times[DRAFTER] = step_times(drafter)[FULL]
        draft = times[DRAFTER][1] / full[1]
    return Costs(times, {size: ms / full[1] for size, ms in full.items()}, slim, draft)
