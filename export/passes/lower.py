"""From a frontend's decoder graph to the one a bundle is made of."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from via_sd.export.passes.attention_semantics import AttentionSemanticsPass, LimitPositionsPass
from via_sd.export.passes.pack_tokens import PackTokensPass
from via_sd.export.passes.step_inputs import LogitRowsPass, StepInputsPass


def lower(model: ir.Model, config: dict[str, Any], max_seq_len: int) -> None:
    """Turn a frontend's decoder graph into ours, in place: step inputs, exact attention, tokens of several
    sequences, logits on demand.

    Args:
        config: Hugging Face text configuration of the model.
        max_seq_len: capacity of a KV buffer in tokens.

    Raises:
        UnsupportedModelError: an attention that the configuration and the graph do not agree on, or no plain causal
            decoder.
    """
    StepInputsPass()(model)
    AttentionSemanticsPass(config, max_seq_len)(model)
    LimitPositionsPass(max_seq_len)(model)
    PackTokensPass()(model)
    LogitRowsPass()(model)
