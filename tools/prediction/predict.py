"""Predict the speed of decoding settings: run their own code over a replay of the model, and add up latencies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from via_sd.contract.graphs import DRAFTER, FULL
from via_sd.contract.manifest import Bundle
from via_sd.runtime import GenerationConfig, Pipeline
from via_sd.runtime.engines.protocol import Engine
from via_sd.runtime.generation.policy import Policy
from via_sd.tools.prediction.replay import Meter, ReplayEngine, Trace, record


@dataclass(frozen=True)
class Forecast:
    """What one setting is expected to do with one prompt.

    Attributes:
        tokens_per_s: of decoding, as in `Statistics`; the host's time is not in it.
        passes: by tier.
    """

    tokens_per_s: float
    passes: Mapping[str, int]


def record_texts(pipeline: Pipeline, prompts: Iterable[str], texts: Iterable[Sequence[int]]) -> list[Trace]:
    """What the tiers of `pipeline` say along `texts`, which plain decoding wrote behind `prompts`."""
    return [
        record(pipeline.verifier, pipeline.drafter, pipeline.encode(prompt), text)
        for prompt, text in zip(prompts, texts, strict=True)
    ]


class Predictor:
    """Runs settings over recorded texts.

    Args:
        bundle: whose drafter and slim-verifier the settings use.
        verifier, drafter: its engines, of which only sizes and limits are asked.
        traces: see `record_texts`.
        step_ms: tier -> tokens of a pass -> milliseconds, see `measure_costs`.
        policy: what the settings choose their blocks by.
    """

    def __init__(
        self,
        bundle: Bundle,
        verifier: Engine,
        drafter: Engine | None,
        traces: Sequence[Trace],
        step_ms: Mapping[str, Mapping[int, float]],
        policy: Policy | None,
    ) -> None:
        self._traces = traces
        self._meter = Meter()
        tiers = {tier: tier for tier in verifier.tiers}
        replay = ReplayEngine(verifier, tiers, traces, step_ms, self._meter)
        drafting = None
        if drafter is not None:
            drafting = ReplayEngine(drafter, {FULL: DRAFTER}, traces, step_ms, self._meter)
        self._pipeline = Pipeline(
            bundle, replay, drafting, max_sequences=1, retained_slots=0, slot_timeout=None, policy=policy
        )

    def forecast(self, setting: Mapping[str, Any]) -> list[Forecast]:
        """What greedy decoding with the options in `setting` is expected to do with each of the texts.

        Raises:
            RequestError: options that the bundle or the policy lacks something for.
        """
        return [self._forecast(trace, setting) for trace in self._traces]

    def _forecast(self, trace: Trace, setting: Mapping[str, Any]) -> Forecast:
        self._meter.__init__()
        length = len(trace.text)
        config = GenerationConfig(**{**setting, "max_new_tokens": length, "ignore_eos": True})
        self._pipeline.generate(list(trace.prompt), config)
        return Forecast(1e3 * (length - 1) / self._meter.elapsed_ms, dict(self._meter.passes))
