"""Masks (what a tier skips or runs in fewer bits) and the search for them. Imports of ours only errors and files."""

from via_sd.errors import MaskError
from via_sd.masks.delta import Delta, LookupDistributions, delta_criterion
from via_sd.masks.distributions import CompactDistributions
from via_sd.masks.evaluator import DistributionEvaluator, Evaluation, Evaluator, MaskedModel
from via_sd.masks.ledger import Record, improvements, recorded_settings, refuse_unfinished
from via_sd.masks.mask import (
    HEAD_STATES,
    QUANTISED_STATES,
    SUBLAYER_STATES,
    HeadState,
    Mask,
    ModelIdentity,
    QuantisedState,
    SublayerState,
)
from via_sd.masks.maskfile import SCHEMA, MaskFormat, parse_mask, read_mask, write_mask
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
from via_sd.masks.space import Granularity, Masks, Space
from via_sd.masks.state_space import SEARCHED_STATES, StateSpace
from via_sd.masks.step_costs import StepCosts
from via_sd.masks.within import search_within

__all__ = [
    "DEFAULT_ALPHA",
    "DEFAULT_BETA",
    "DEFAULT_OBJECTIVE",
    "HEAD_STATES",
    "OBJECTIVES",
    "QUANTISED_STATES",
    "SCHEMA",
    "SEARCHED_STATES",
    "SUBLAYER_STATES",
    "CompactDistributions",
    "Delta",
    "DistributionEvaluator",
    "Evaluation",
    "Evaluator",
    "Granularity",
    "HeadState",
    "LookupDistributions",
    "Mask",
    "MaskError",
    "MaskFormat",
    "MaskedModel",
    "Masks",
    "ModelIdentity",
    "Objective",
    "QuantisedState",
    "Record",
    "SearchResult",
    "Space",
    "StateSpace",
    "StepCosts",
    "SublayerState",
    "delta_criterion",
    "flipped_via_cost",
    "forward_kl",
    "improvements",
    "objective_by_name",
    "parse_mask",
    "read_mask",
    "recorded_settings",
    "refuse_unfinished",
    "search",
    "search_within",
    "via_cost",
    "write_mask",
]
