"""Graph passes on `onnx_ir`, one subject each; every class says what it requires and what it ensures."""

from via_sd.export.passes.attention_semantics import AttentionSemanticsPass, LimitPositionsPass
from via_sd.export.passes.branches import Bridge, Substitutes
from via_sd.export.passes.fuse_mlp import FuseGateUpPass
from via_sd.export.passes.open_stream import OpenStreamPass
from via_sd.export.passes.pack_tokens import PackTokensPass, UnpackTokensPass
from via_sd.export.passes.prune import PrunePass
from via_sd.export.passes.quantize import QuantizePass, constant_products
from via_sd.export.passes.residual import State, Sublayer, find_sublayers
from via_sd.export.passes.route import RoutePass
from via_sd.export.passes.segments import (
    Segment,
    branch_flags,
    bridge_name,
    keep_vector,
    plan_segments,
    sublayer_segments,
)
from via_sd.export.passes.shared_table import SharedTablePass
from via_sd.export.passes.step_inputs import LogitRowsPass, StepInputsPass

__all__ = [
    "AttentionSemanticsPass",
    "Bridge",
    "FuseGateUpPass",
    "LimitPositionsPass",
    "LogitRowsPass",
    "OpenStreamPass",
    "PackTokensPass",
    "PrunePass",
    "QuantizePass",
    "RoutePass",
    "Segment",
    "SharedTablePass",
    "State",
    "StepInputsPass",
    "Sublayer",
    "Substitutes",
    "UnpackTokensPass",
    "branch_flags",
    "bridge_name",
    "constant_products",
    "find_sublayers",
    "keep_vector",
    "plan_segments",
    "sublayer_segments",
]
