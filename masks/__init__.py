"""What to skip: mask files and the search for masks. Imports nothing else of ours."""

from via_sd.masks.distributions import CompactDistributions
from via_sd.masks.evaluator import DistributionEvaluator, Evaluation, Evaluator, MaskedModel
from via_sd.masks.maskfile import (
    SCHEMA,
    Mask,
    MaskError,
    MaskFormat,
    ModelIdentity,
    parse_mask,
    read_mask,
    write_mask,
)
from via_sd.masks.objective import (
    DEFAULT_OBJECTIVE,
    OBJECTIVES,
    Objective,
    flipped_via_cost,
    forward_kl,
    objective_by_name,
    via_cost,
)

__all__ = [
    "DEFAULT_OBJECTIVE",
    "OBJECTIVES",
    "SCHEMA",
    "CompactDistributions",
    "DistributionEvaluator",
    "Evaluation",
    "Evaluator",
    "Mask",
    "MaskError",
    "MaskFormat",
    "MaskedModel",
    "ModelIdentity",
    "Objective",
    "flipped_via_cost",
    "forward_kl",
    "objective_by_name",
    "parse_mask",
    "read_mask",
    "via_cost",
    "write_mask",
]
