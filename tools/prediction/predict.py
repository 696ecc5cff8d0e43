"""Predict the speed of decoding settings: run their own code over a replay of the model, and add up latencies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import geometric_mean
from typing import Any

import numpy as np

from via_sd.contract.generation_options import for_mode
from via_sd.contract.graphs import DRAFTER, FULL
from via_sd.contract.manifest import Bundle
from via_sd.runtime import GenerationConfig, Pipeline
from via_sd.runtime.engines.protocol import Engine
from via_sd.runtime.generation.policy import Policy
from via_sd.tools.prediction.latency import Costs
from via_sd.tools.prediction.replay import Meter, Opinion, ReplayEngine, Trace, record

#: The tier that a synthetic slim-verifier or drafter stands for.
SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class Forecast:
    """What one setting is expected to do with one prompt.

    Attributes:
        tokens_per_s: of decoding, as in `Statistics`; the host's time is not in it.
        passes: by tier.
    """

    tokens_per_s: float
    passes: Mapping[str, int]


@dataclass(frozen=True)
class SyntheticTier:
    """A slim-verifier or a drafter that is not there: chance decides where it agrees with the full verifier.

    Attributes:
        acceptance: share of the full verifier's tokens that it says too, 0 to 1.
        cost: of its passes over those of the full verifier.
    """

    acceptance: float
    cost: float

    def along(self, trace: Trace, seed: int) -> Trace:
        """`trace` with the opinions of this tier; its margins say nothing about where it agrees."""
        chance = Random(seed)
        said = (token if chance.random() < self.acceptance else token ^ 1 for token in trace.text)
        return replace(trace, opinions={**trace.opinions, SYNTHETIC: tuple(Opinion(t, 1.0, 1.0) for t in said)})


def record_texts(pipeline: Pipeline, prompts: Iterable[str], texts: Iterable[Sequence[int]]) -> list[Trace]:
    """What the tiers of `pipeline` say along `texts`, which plain decoding wrote behind `prompts`."""
    shared_vocab = pipeline.bundle.manifest["drafter"].get("shared_vocab", 0)
    return [
        record(pipeline.verifier, pipeline.drafter, pipeline.encode(prompt), text, shared_vocab)
        for prompt, text in zip(prompts, texts, strict=True)
    ]


class Predictor:
    """Runs settings over recorded texts.

    Args:
        bundle: whose drafter and slim-verifier the settings use.
        verifier, drafter: its engines, of which only sizes and limits are asked.
        traces: see `record_texts`.
        costs: latency of the passes.
        policy: what the settings choose their blocks by.
    """

    def __init__(
        self,
        bundle: Bundle,
        verifier: Engine,
        drafter: Engine | None,
        traces: Sequence[Trace],
        costs: Costs,
        policy: Policy | None,
    ) -> None:
        self._parts, self._costs = (bundle, verifier, drafter), costs
        self._traces = traces
        self._meter = Meter()
        tiers = {tier: tier for tier in (*verifier.tiers, *({SYNTHETIC} & costs.step_ms.keys()))}
        replay = ReplayEngine(verifier, tiers, traces, costs.step_ms, self._meter)
        drafting = None
        if drafter is not None:
            drafting = ReplayEngine(drafter, {FULL: DRAFTER}, traces, costs.step_ms, self._meter)
        self._pipeline = Pipeline(
            bundle, replay, drafting, max_sequences=1, retained_slots=0, slot_timeout=None, policy=policy
        )

    def forecast(self, setting: Mapping[str, Any]) -> list[Forecast]:
        """What greedy decoding with the options in `setting` is expected to do with each of the texts.

        Raises:
            RequestError: options that the bundle or the policy lacks something for.
            NoLogitsError: options, or rules of the model's own, that a replay cannot follow.
        """
        return [self._forecast(trace, setting) for trace in self._traces]

    def with_slim(self, tier: SyntheticTier) -> Predictor:
        """The same bundle with a synthetic slim-verifier."""
        return self._with(tier, {"slim": SYNTHETIC}, self._costs.draft)

    def with_drafter(self, tier: SyntheticTier) -> Predictor:
        """The same bundle with a synthetic drafter."""
        return self._with(tier, {"drafter": {"kind": "mask", "tier": SYNTHETIC}}, tier.cost)

    def _with(self, tier: SyntheticTier, manifest: Mapping[str, Any], draft: float | None) -> Predictor:
        bundle, verifier, drafter = self._parts
        changed = replace(bundle, manifest={**bundle.manifest, **manifest})
        slim = {size: tier.cost * cost for size, cost in self._costs.full.items()}
        step_ms = {**self._costs.step_ms, SYNTHETIC: {s: tier.cost * ms for s, ms in self._costs.step_ms[FULL].items()}}
        policy = Policy({"mode": "plain"}, "plain", self._costs.full, slim, draft)
        traces = [tier.along(trace, index) for index, trace in enumerate(self._traces)]
        costs = Costs(step_ms, self._costs.full, slim, draft)
        return Predictor(changed, verifier, None if "drafter" in manifest else drafter, traces, costs, policy)

    def _forecast(self, trace: Trace, setting: Mapping[str, Any]) -> Forecast:
        self._meter.reset()
        length = len(trace.text)
        config = GenerationConfig(**for_mode({**setting, "max_new_tokens": length, "ignore_eos": True}))
        self._pipeline.generate(list(trace.prompt), config)
        return Forecast(1e3 * (length - 1) / self._meter.elapsed_ms, dict(self._meter.passes))


def summarise_forecasts(
    forecasts: Mapping[str, Sequence[Forecast]], plain: Sequence[Forecast], buckets: Sequence[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Label -> bucket (`all` too) -> `tokens_per_s` and `over_plain`, geometric means over prompts.

    Args:
        forecasts: label -> a forecast per prompt.
        plain: those of plain decoding.
        buckets: the bucket of each prompt.
    """

    def figures(found: Sequence[Forecast], bucket: str) -> dict[str, float]:
        chosen = [i for i, each in enumerate(buckets) if bucket in ("all", each)]
        speeds = np.array([found[i].tokens_per_s for i in chosen])
        base = np.array([plain[i].tokens_per_s for i in chosen])
        return {"tokens_per_s": geometric_mean(speeds.tolist()), "over_plain": geometric_mean((speeds / base).tolist())}

    names = ("all", *dict.fromkeys(buckets))
    return {label: {name: figures(found, name) for name in names} for label, found in forecasts.items()}
