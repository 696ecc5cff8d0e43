"""Run everything that `auto` could mean on the user's prompts, and choose.

A prediction (see `Predictor`) says why a mode is fast. One that is a few per cent off picks the wrong mode, so runs
choose. The router's thresholds, of which several are tried, run in a first, short round, whose audit the router is
calibrated on; the best of them, the calibrated router and the exact modes run in the whole one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from via_sd.contract.mode_names import CALIBRATED
from via_sd.progress import Progress, no_progress, prefixed
from via_sd.runtime import EXACT_MODES, Bundle, Pipeline
from via_sd.runtime.decoding.router import RouterMargins
from via_sd.runtime.engines.protocol import Engine
from via_sd.runtime.generation.policy import Policy
from via_sd.tools.bench.prompts import Prompt
from via_sd.tools.bench.run import PLAIN, Sample, run_bench, summarise
from via_sd.tools.calibration.margins import fit_margins, judged_once
from via_sd.tools.prediction.latency import Costs

#: Outer thresholds of the router that are tried (paper Algorithm 2); its own is the first.
ALPHA2 = (0.3, 0.5, 0.7, 0.9)
SPECULATIVE = "speculative"
#: The label of the router that is calibrated on the first round.
BY_MARGIN = "routed, calibrated"
#: Tokens of each answer in the first round.
FIRST_ROUND_TOKENS = 48
#: What a candidate has to gain over a simpler one to be preferred.
LEAST_GAIN = 1.02
#: Slim passes per token below which a mode with three tiers is one with two, and faster or slower by chance.
LEAST_SLIM = 0.05


@dataclass(frozen=True)
class Rounds:
    """What running the candidates gave.

    Attributes:
        first, second: figures by label, see `summarise`.
        router: calibrated on the first round; None without one.
    """

    first: dict[str, dict[str, Any]]
    second: dict[str, dict[str, Any]]
    router: RouterMargins | None


def pipeline_by(costs: Costs, bundle: Bundle, verifier: Engine, drafter: Engine | None) -> Pipeline:
    """A pipeline whose modes choose their blocks by `costs`; which of them is best is not known yet."""
    policy = Policy({"mode": PLAIN}, PLAIN, costs.full, costs.slim, costs.draft)
    return Pipeline(bundle, verifier, drafter, max_sequences=1, retained_slots=1, slot_timeout=None, policy=policy)


def candidates(bundle: Bundle, max_divergence: float | None) -> dict[str, dict[str, Any]]:
    """Label -> options of everything `auto` could be, simplest first; `routed` only if some divergence is allowed."""
    found: dict[str, dict[str, Any]] = {PLAIN: {"mode": PLAIN}, SPECULATIVE: {"mode": SPECULATIVE}}
    if bundle.slim is None:
        return found
    found["cascade"] = {"mode": "cascade"}
    if max_divergence:
        routed = {"mode": "routed", "max_divergence": max_divergence}
        found["routed, paper"] = {**routed, "router": "paper"}
        found |= {f"routed, alpha2 {alpha2}": {**routed, "alpha2": alpha2} for alpha2 in ALPHA2}
        found[BY_MARGIN] = {**routed, "router": CALIBRATED}
    return found


def run_rounds(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    tried: Mapping[str, Mapping[str, Any]],
    *,
    max_divergence: float | None,
    max_new_tokens: int,
    repeats: int,
    progress: Progress = no_progress,
) -> Rounds:
    """Run the candidates, see `candidates`; the pipeline's policy gets the router that the first round calibrates."""

    def round_of(labels: Iterable[str], tokens: int, times: int, name: str, **options: Any) -> list[Sample]:
        return run_bench(
            pipeline,
            prompts,
            {label: tried[label] for label in labels},
            max_new_tokens=tokens,
            repeats=times,
            progress=prefixed(progress, f"{name} round"),
            **options,
        )

    finalists = [label for label in tried if is_exact(tried[label])]
    first: dict[str, dict[str, Any]] = {}
    router = None
    if max_divergence and BY_MARGIN in tried:
        gates = [label for label in tried if label not in (*finalists, BY_MARGIN)]
        samples = round_of(gates, min(max_new_tokens, FIRST_ROUND_TOKENS), 1, "first", keep_margins=True)
        first = summarise(samples, prompts)
        fitting = [label for label in gates if _keeps_to(first[label], max_divergence)]
        finalists += sorted(fitting, key=lambda label: -_speed(first[label]))[:1]
        router = fit_margins(judged_once(samples), max_divergence)
        if not router.gate(max_divergence).shut:
            finalists.append(BY_MARGIN)
            assert pipeline.policy is not None
            pipeline.policy = replace(pipeline.policy, router=router)
    second = round_of(finalists, max_new_tokens, repeats, "second")
    return Rounds(first, summarise(second, prompts), router)


def is_exact(options: Mapping[str, Any]) -> bool:
    return options["mode"] in EXACT_MODES


def winner_of(figures: Mapping[str, Mapping[str, Any]], max_divergence: float | None) -> str:
    """The last label that keeps to `max_divergence` and beats all such before it by `LEAST_GAIN`; a mode with
    slim counts only if it makes at least `LEAST_SLIM` slim passes a token.
    """
    winner, best = PLAIN, 0.0
    for label, each in figures.items():
        idle = label not in (PLAIN, SPECULATIVE) and not _uses_slim(each)
        if idle or not _keeps_to(each, max_divergence):
            continue
        if _speed(each) > LEAST_GAIN * best:
            winner = label
        best = max(best, _speed(each))
    return winner


def policy_of(
    tried: Mapping[str, Mapping[str, Any]], rounds: Rounds, max_divergence: float | None, costs: Costs
) -> Policy:
    """The policy that the second round speaks for."""
    exact = {label: each for label, each in rounds.second.items() if is_exact(tried[label])}
    return Policy(
        tried[winner_of(rounds.second, max_divergence)],
        tried[winner_of(exact, None)]["mode"],
        costs.full,
        costs.slim,
        costs.draft,
        rounds.router,
    )


def slim_verdict(
    tried: Mapping[str, Mapping[str, Any]], figures: Mapping[str, Mapping[str, Any]], max_divergence: float | None
) -> str:
    """Whether the slim tier pays, in words, by the `figures` of the second round."""
    with_slim = [
        label
        for label, each in figures.items()
        if tried[label]["mode"] in ("cascade", "routed") and _keeps_to(each, max_divergence)
    ]
    if not with_slim:
        return "The bundle has no slim-verifier."
    if winner_of(figures, max_divergence) in with_slim:
        return "The slim tier pays here."
    using = [label for label in with_slim if _uses_slim(figures[label])]
    if not using:
        return "The slim tier does not pay here: the modes that have it leave it out."
    best = max(using, key=lambda label: _speed(figures[label]))
    ratio = _speed(figures[best]) / _speed(figures[SPECULATIVE])
    return f"The slim tier does not pay here: {best}, the best with it, is {ratio:.2f}x of speculative."


def _speed(figures: Mapping[str, Any]) -> float:
    return float(figures["all"]["tokens_per_s"]["median"])


def _uses_slim(figures: Mapping[str, Any]) -> bool:
    return float(figures["all"]["slim_calls_per_token"]) >= LEAST_SLIM


def _keeps_to(figures: Mapping[str, Any], max_divergence: float | None) -> bool:
    divergence = figures["all"]["divergence"]
    return divergence is None or max_divergence is None or divergence <= max_divergence
