"""The cost model where `calibrate` was not run on this machine."""

from __future__ import annotations

from via_sd.runtime.decoding.cost_model import CostModel, StepCost

#: Latency of a full pass over S tokens over that of a pass over one (SmolLM2-135M, two x86-64 cores).
_FULL = {
    "fp32": {1: 1.0, 2: 1.13, 4: 1.15, 6: 1.18, 8: 1.33, 9: 1.41, 12: 1.48, 16: 1.72},
    "int8": {1: 1.0, 2: 1.15, 4: 1.5, 8: 2.1, 16: 3.3},
    "int4": {1: 1.0, 2: 1.27, 4: 1.8, 8: 2.7, 16: 4.5},
}
#: Precisions of a bundle's weights that there are costs for.
PRECISIONS = tuple(_FULL)
#: Share of a pass's latency that its layers take; the LM head takes the rest.
_LAYER_SHARE = 0.8
#: Of one drafted token, by kind of drafter.
_DRAFT = {"ngram": 0.0, "mask": 0.5, "model": 0.35}


def default_costs(precision: str, *, skip_ratio: float | None, drafter: str) -> CostModel:
    """Costs of a bundle in `precision`, whose slim-verifier skips `skip_ratio` of the layers (None: it has none)."""
    slim = 1.0 if skip_ratio is None else 1 - _LAYER_SHARE * skip_ratio
    return CostModel(StepCost(_FULL[precision]), slim, _DRAFT.get(drafter, 0.0))
