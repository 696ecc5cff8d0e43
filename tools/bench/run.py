"""Measure modes against each other on one loaded bundle: interleaved, same prompts, plain in the same run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from via_sd.contract.generation_options import for_mode
from via_sd.contract.mode_names import SPECULATIVE
from via_sd.errors import RequestError
from via_sd.progress import Progress, no_progress
from via_sd.runtime import GenerationConfig, Pipeline
from via_sd.runtime.decoding.statistics import TOKEN_TIERS, JudgedMargin, Statistics
from via_sd.tools.bench.prompts import Prompt

PLAIN = "plain"


def settings_of(modes: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A setting for each mode, under its name."""
    return {mode: {"mode": mode} for mode in modes}


@dataclass(frozen=True)
class Sample:
    """One generation: which setting, prompt and repeat, and what it gave (see `Completion`)."""

    setting: str
    prompt: int
    repeat: int
    token_ids: list[int]
    stats: Statistics
    margins: list[JudgedMargin]

    @property
    def tokens_per_s(self) -> float:
        """Of a generation of two tokens or more, which is what a bench asks for."""
        assert self.stats.tokens_per_s is not None
        return self.stats.tokens_per_s


def run_bench(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    settings: Mapping[str, Mapping[str, Any]],
    *,
    max_new_tokens: int,
    repeats: int,
    progress: Progress = no_progress,
    **options: Any,
) -> list[Sample]:
    """Generate every prompt in every setting, settings in turn so that a drifting machine meets all alike.

    Greedy unless `options` say otherwise, end-of-sequence ignored so that every run has the same length; `routed` ends
    with an audit of its tail. One untimed generation of each setting warms up, and another puts the KV of a prompt into
    the buffers, a model drafter's too: else the first setting would read it for all that follow.

    Args:
        settings: label -> options of a request, the mode among them; plain decoding is measured in any case.
        options: of every request, under those of its setting.
    """
    for prompt in prompts:
        room = pipeline.capacity - len(pipeline.encode(prompt.text))
        if room < max_new_tokens:
            raise RequestError(
                f"prompt {prompt.text[:40]!r}… leaves room for {room} tokens in the KV buffers, wanted {max_new_tokens}"
            )
    every = {PLAIN: {"mode": PLAIN}, **settings}
    base = {"max_new_tokens": max_new_tokens, "ignore_eos": True, "audit_tail": True, **options}
    for setting in every.values():
        pipeline.generate(prompts[0].text, _config(base, setting, max_new_tokens=16))
    samples = []
    total = repeats * len(prompts) * len(every)
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            pipeline.generate(prompt.text, _config(base, {"mode": SPECULATIVE}, max_new_tokens=3))
            for label, setting in every.items():
                completion = pipeline.generate(prompt.text, _config(base, setting))
                samples.append(Sample(label, index, repeat, completion.token_ids, completion.stats, completion.margins))
                progress(f"{label}: prompt {index + 1} of {len(prompts)}", len(samples) / total)
    return samples


def _config(base: Mapping[str, Any], setting: Mapping[str, Any], **more: Any) -> GenerationConfig:
    return GenerationConfig(**for_mode({**base, **setting, **more}))


def summarise(samples: Sequence[Sample], prompts: Sequence[Prompt]) -> dict[str, dict[str, Any]]:
    """Per setting: speed (tokens/s; geometric mean over prompts of the median over repeats, with the extremes), speed
    over plain, counts, and whether the output equals plain's, over all prompts (`all`) and per bucket.
    """
    buckets = ["all", *dict.fromkeys(p.bucket for p in prompts)]
    settings = list(dict.fromkeys(s.setting for s in samples))
    plain = {(s.prompt, s.repeat): s for s in samples if s.setting == PLAIN}
    summary: dict[str, dict[str, Any]] = {}
    for setting in settings:
        summary[setting] = {}
        for bucket in buckets:
            chosen = [s for s in samples if s.setting == setting and bucket in ("all", prompts[s.prompt].bucket)]
            summary[setting][bucket] = _figures(chosen, plain)
    return summary


def _figures(chosen: Sequence[Sample], plain: dict[tuple[int, int], Sample]) -> dict[str, Any]:
    speeds = _by_prompt(chosen, lambda s: s.tokens_per_s)
    ratios = _by_prompt(chosen, lambda s: s.tokens_per_s / plain[s.prompt, s.repeat].tokens_per_s)
    runs = [s.stats for s in chosen]
    emitted, evaluated = sum(run.emitted_tokens for run in runs), sum(run.evaluated_tokens for run in runs)
    checked = sum(run.divergence.checked for run in runs)
    return {
        "tokens_per_s": _spread(speeds),
        "over_plain": _spread(ratios),
        "rejection_rate": 1 - sum(run.accepted_tokens for run in runs) / evaluated if evaluated else None,
        "tiers": {tier: sum(run.tier_counts[tier] for run in runs) / emitted for tier in TOKEN_TIERS},
        "full_calls_per_token": sum(run.full_calls for run in runs) / emitted,
        "slim_calls_per_token": sum(run.slim_calls for run in runs) / emitted,
        "escalation_rate": sum(run.escalations for run in runs) / emitted,
        "divergence": sum(run.divergence.disagreed for run in runs) / checked if checked else None,
        "host_share": sum(run.time_ms.host for run in runs) / sum(run.time_ms.total for run in runs),
        "equal_to_plain": sum(s.token_ids == plain[s.prompt, s.repeat].token_ids for s in chosen) / len(chosen),
    }


def _by_prompt(samples: Iterable[Sample], figure: Callable[[Sample], float]) -> list[list[float]]:
    """Figures grouped by prompt, one per repeat."""
    grouped: dict[int, list[float]] = {}
    for sample in samples:
        grouped.setdefault(sample.prompt, []).append(figure(sample))
    return list(grouped.values())


def _spread(grouped: Sequence[Sequence[float]]) -> dict[str, float]:
    """Geometric mean over prompts of the median, least and greatest repeat."""
    return {
        name: math.exp(statistics.fmean(math.log(pick(values)) for values in grouped))
        for name, pick in (("median", statistics.median), ("min", min), ("max", max))
    }
