"""What to skip: mask files and the search for masks. Imports nothing of ours but errors and files."""

from via_sd.errors import MaskError
from via_sd.masks.delta import Delta, LookupDistributions, delta_criterion
from via_sd.masks.distributions import CompactDistributions
from via_sd.masks.evaluator import DistributionEvaluator, Evaluation, Evaluator, MaskedModel
from via_sd.masks.ledger import Record, improvements, refuse_unfinished
from via_sd.masks.maskfile import (
    SCHEMA,
    Mask,
    MaskFormat,
    ModelIdentity,
    parse_mask,
    read_mask,
    write_mask,
)
from via_sd.masks.objective import (
    DEFAULT_ALPHA,
    DEFAULT_BETA,
    DEFAULT_OBJECTIVE,
    OBJECTIVES,
    Objective,
    flipped_via_cost,
    forward_kl,
    objective_by_name,
    via_cost,
)
from via_sd.masks.search import SearchResult, search
from via_sd.masks.space import Granularity, Space

__all__ = [
    "DEFAULT_ALPHA",
    "DEFAULT_BETA",
    "DEFAULT_OBJECTIVE",
    "OBJECTIVES",
    "SCHEMA",
    "CompactDistributions",
    "Delta",
    "DistributionEvaluator",
    "Evaluation",
    "Evaluator",
    "Granularity",
    "LookupDistributions",
    "Mask",
    "MaskError",
    "MaskFormat",
    "MaskedModel",
    "ModelIdentity",
    "Objective",
    "Record",
    "SearchResult",
    "Space",
    "delta_criterion",
    "flipped_via_cost",
    "forward_kl",
    "improvements",
    "objective_by_name",
    "parse_mask",
    "read_mask",
    "refuse_unfinished",
    "search",
    "via_cost",
    "write_mask",
]
