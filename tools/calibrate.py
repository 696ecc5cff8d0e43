"""Find what `auto` should do on this machine: what passes cost here, and which mode is fastest on the user's prompts.

Nothing is predicted: a model of speculative decoding that is a few per cent off picks the wrong mode, and a short run
tells. All candidates run on a first, short round; the best of them, and plain decoding, on the whole one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from via_sd.runtime import Pipeline
from via_sd.runtime.engine import FULL
from via_sd.runtime.policy import Policy
from via_sd.tools.bench import PLAIN, run_bench, summarise
from via_sd.tools.prompts import Prompt
from via_sd.tools.step_times import step_times

#: Outer thresholds of the router that are tried (paper Algorithm 2); its own is the first.
ALPHA2 = (0.3, 0.5, 0.7, 0.9)
#: How many candidates reach the second round, and the tokens of each answer in the first.
FINALISTS, FIRST_ROUND_TOKENS = 3, 48
#: What a candidate has to gain over a simpler one to be preferred.
MARGIN = 1.02


@dataclass(frozen=True)
class Costs:
    """What passes cost on this machine.

    Attributes:
        step_ms: tier -> tokens of a pass -> milliseconds; a model drafter's are under `drafter`.
        full, slim, draft: as in `Policy`.
    """

    step_ms: dict[str, dict[int, float]]
    full: dict[int, float]
    slim: float | None
    draft: float | None


def measure_costs(pipeline: Pipeline) -> Costs:
    """Time the passes of every tier of `pipeline`, and of its drafter."""
    bundle, times = pipeline.bundle, step_times(pipeline.verifier)
    full = times[FULL]
    slim = draft = None
    if bundle.slim is not None:
        ratios = [times[bundle.slim][size] / full[size] for size in full]
        slim = math.exp(fmean(map(math.log, ratios)))
    drafter = bundle.manifest["drafter"]
    if drafter["kind"] == "mask":
        draft = times[drafter["tier"]][1] / full[1]
    elif pipeline.drafter is not None:
        times["drafter"] = step_times(pipeline.drafter)[FULL]
        draft = times["drafter"][1] / full[1]
    return Costs(times, {size: full[size] / full[1] for size in full}, slim, draft)


def candidates(pipeline: Pipeline, max_divergence: float | None) -> dict[str, dict[str, Any]]:
    """Label -> options of everything `auto` could be, simplest first; `routed` only if some divergence is allowed."""
    found: dict[str, dict[str, Any]] = {PLAIN: {"mode": PLAIN}, "speculative": {"mode": "speculative"}}
    if pipeline.bundle.slim is None:
        return found
    found["cascade"] = {"mode": "cascade"}
    if max_divergence is not None:
        for alpha2 in ALPHA2:
            options = {"mode": "routed", "alpha2": alpha2, "max_divergence": max_divergence}
            found[f"routed, alpha2 {alpha2}"] = options
    return found


def choose(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    tried: Mapping[str, Mapping[str, Any]],
    *,
    max_divergence: float | None,
    max_new_tokens: int,
    repeats: int,
    progress: Callable[[str, float | None], None] = lambda *_: None,
) -> tuple[str, dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """The fastest candidate that keeps to `max_divergence`.

    Returns:
        Its label; the figures of the first round, and of the second, by label (see `summarise`).
    """

    def round_of(labels: Sequence[str], tokens: int, times: int, name: str) -> dict[str, dict[str, Any]]:
        samples = run_bench(
            pipeline,
            prompts,
            {label: tried[label] for label in labels},
            max_new_tokens=tokens,
            repeats=times,
            progress=lambda text, share: progress(f"{name}: {text}", share),
        )
        return summarise(samples, prompts)

    first = round_of(list(tried), min(max_new_tokens, FIRST_ROUND_TOKENS), 1, "first round")
    fitting = [label for label in tried if _keeps_to(first[label], max_divergence)]
    best = sorted(fitting, key=lambda label: -_speed(first[label]))[:FINALISTS]
    # Plain is in every round, and in the order of `tried`, which is from the simple to the involved.
    second = round_of([label for label in tried if label in best or label == PLAIN], max_new_tokens, repeats, "second")
    return winner_of(second, max_divergence), first, second


def winner_of(figures: Mapping[str, Mapping[str, Any]], max_divergence: float | None) -> str:
    """The fastest label that keeps to `max_divergence`; a later one has to beat those before it by `MARGIN`."""
    winner = PLAIN
    for label, each in figures.items():
        if _keeps_to(each, max_divergence) and _speed(each) > MARGIN * _speed(figures[winner]):
            winner = label
    return winner


def policy_of(options: Mapping[str, Any], costs: Costs) -> Policy:
    """The policy that takes `options`, those of the winner."""
    others = {name: value for name, value in options.items() if name != "mode"}
    return Policy(options["mode"], others, costs.full, costs.slim, costs.draft)


def _speed(figures: Mapping[str, Any]) -> float:
    return float(figures["all"]["tokens_per_s"]["median"])


def _keeps_to(figures: Mapping[str, Any], max_divergence: float | None) -> bool:
    divergence = figures["all"]["divergence"]
    return divergence is None or max_divergence is None or divergence <= max_divergence
