"""The cost model where `calibrate` was not run on this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from via_sd.masks import Mask
from via_sd.runtime.decoding.cost_model import CostModel, StepCost
from via_sd.runtime.decoding.slim_agreement import expected_agreement

#: Latency of a pass over S tokens by the precision of the weights, in float32 passes over one token (SmolLM2-135M, ONNX
#: Runtime 1.32, two x86-64 cores).
_LATENCY: dict[str, dict[int, float]] = {
    "fp32": {1: 1.0, 2: 1.03, 4: 1.09, 8: 1.29, 16: 1.72},
    "int8": {1: 0.36, 2: 0.44, 4: 0.62, 8: 0.93, 16: 1.57},
    "int4": {1: 0.29, 2: 0.40, 4: 0.59, 8: 0.94, 16: 1.66},
}
_LATENCY["fp16"] = _LATENCY["fp32"]  # on a CPU, products in float16 are computed in float32
#: Precisions of a bundle's weights that there are costs for.
PRECISIONS = tuple(_LATENCY)
#: Share of a pass's latency that the LM head takes.
_HEAD = 0.2
#: Latency of a linear map in place of a run of sublayers, in sublayers, which have about six times its weights.
_BRIDGE = 0.17
#: Of one drafted token, by kind of drafter.
_DRAFT = {"ngram": 0.0, "mask": 0.5, "model": 0.35}


def default_costs(precision: str, *, slim: Mask | None, drafter: str) -> CostModel:
    """Costs of a bundle in `precision` with the slim-verifier `slim` (None: it has none)."""
    full = _LATENCY[precision]
    costs = {size: full[size] if slim is None else _tier_latency(slim, precision, size) for size in full}
    draft = _DRAFT.get(drafter, 0.0)
    return CostModel(_relative(full, full[1]), _relative(costs, full[1]), draft, expected_agreement(slim))


def _tier_latency(mask: Mask, precision: str, size: int) -> float:
    """Latency of a pass over `size` tokens that does with every sublayer and the head what `mask` says."""

    def latency(state: str) -> float:
        return _LATENCY[precision if state == "keep" else state][size]

    states = Counter(state for state, runs in zip(mask.states, mask.sublayers, strict=True) if runs)
    sublayers = sum(count * latency(state) for state, count in states.items())
    sublayers += len(mask.bridges) * _BRIDGE * latency("keep")
    return _HEAD * latency(mask.head) + (1 - _HEAD) * sublayers / len(mask.states)


def _relative(latency: Mapping[int, float], unit: float) -> StepCost:
    return StepCost({size: time / unit for size, time in latency.items()})
