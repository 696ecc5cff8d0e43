"""Predict how fast decoding settings are, from the latency of forward passes and what the tiers say along known texts.

from via_sd.tools.prediction import Predictor, measure_costs, record_texts

pipeline = load("bundle")
costs = measure_costs(pipeline.bundle, pipeline.verifier, pipeline.drafter)
traces = record_texts(pipeline, ["Why is the sky blue?"], [pipeline.generate("Why is the sky blue?").token_ids])
predictor = Predictor(pipeline.bundle, pipeline.verifier, pipeline.drafter, traces, costs, None)
print(predictor.forecast({"mode": "cascade"})[0].tokens_per_s)
"""

from via_sd.tools.prediction.latency import Costs, measure_costs
from via_sd.tools.prediction.predict import Forecast, Predictor, SyntheticTier, record_texts, summarise_forecasts

__all__ = ["Costs", "Forecast", "Predictor", "SyntheticTier", "measure_costs", "record_texts", "summarise_forecasts"]
