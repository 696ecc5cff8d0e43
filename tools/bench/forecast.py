"""What a bench is expected to find: the speed of its settings, from passes and texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from via_sd.runtime import Pipeline
from via_sd.tools.bench.prompts import Prompt
from via_sd.tools.bench.run import PLAIN, Sample
from via_sd.tools.prediction import Costs, Predictor, SyntheticTier, record_texts, summarise_forecasts
from via_sd.tools.prediction.replay import NoLogitsError, Trace

Predicted = Mapping[str, Mapping[str, Mapping[str, float]]]


def forecast_settings(
    predictor: Predictor,
    settings: Mapping[str, Mapping[str, Any]],
    prompts: Sequence[Prompt],
    synthetic: SyntheticTier | None = None,
) -> Predicted | None:
    """Predicted speed of `settings` (label -> options; plain decoding comes first in any case), see
    `summarise_forecasts`; and that of a drafter and of a slim-verifier like `synthetic`. None where a replay cannot
    follow the options or the rules of the model.
    """
    try:
        found = {label: predictor.forecast(setting) for label, setting in {PLAIN: {"mode": PLAIN}, **settings}.items()}
        if synthetic is not None:
            drafting, verifying = predictor.with_drafter(synthetic), predictor.with_slim(synthetic)
            found["speculative, synthetic drafter"] = drafting.forecast({"mode": "speculative"})
            found["cascade, synthetic slim"] = verifying.forecast({"mode": "cascade"})
    except NoLogitsError:
        return None
    return summarise_forecasts(found, found[PLAIN], [prompt.bucket for prompt in prompts])


def traces_of(pipeline: Pipeline, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Trace]:
    """What the tiers of `pipeline` say along the texts that plain decoding wrote in a bench."""
    texts = {sample.prompt: sample.token_ids for sample in samples if sample.setting == PLAIN}
    return record_texts(pipeline, [prompt.text for prompt in prompts], [texts[i] for i in range(len(prompts))])


def forecast_bench(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    settings: Mapping[str, Mapping[str, Any]],
    samples: Sequence[Sample],
    costs: Costs,
) -> Predicted | None:
    """What a bench of `settings` should have found by `costs`; `samples` are its own, for plain's texts."""
    traces = traces_of(pipeline, prompts, samples)
    predictor = Predictor(pipeline.bundle, pipeline.verifier, pipeline.drafter, traces, costs, pipeline.policy)
    return forecast_settings(predictor, settings, prompts)
