"""Make every attention node say what the checkpoint's configuration says: window, scale, soft cap.

Frontends drop these silently for some families; a greedy decode hides it, the logits do not. What GroupQueryAttention
can express is corrected here, what it cannot is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from via_sd.errors import UnsupportedModelError
from via_sd.export.passes import gqa

#: The kernel rotates heads, and parts of heads, of sizes that are multiples of it.
_ROTARY_UNIT = 16


@dataclass(frozen=True)
class AttentionSemantics:
    """One layer's attention: `window` in tokens (-1: unlimited), score `scale`, score soft cap (0: none)."""

    window: int
    scale: float
    softcap: float


def semantics_of(config: dict[str, Any]) -> list[AttentionSemantics]:
    """What `config` (a Hugging Face text config) asks of each layer's attention."""
    layers = int(config["num_hidden_layers"])
    head_dim = config.get("head_dim") or int(config["hidden_size"]) // int(config["num_attention_heads"])
    if config.get("attention_multiplier") is not None:
        scale = float(config["attention_multiplier"])
    else:
        scale = 1.0 / math.sqrt(config.get("query_pre_attn_scalar") or head_dim)
    softcap = float(config.get("attn_logit_softcapping") or 0.0)
    window = config.get("sliding_window")
    if config.get("use_sliding_window") is False:
        window = None
    kinds = config.get("layer_types") or ["sliding_attention" if window else "full_attention"] * layers
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise UnsupportedModelError(f"layers of type {', '.join(unknown)} have no KV cache of the kind the tiers share")
    return [
        AttentionSemantics(int(window) if kind == "sliding_attention" and window else -1, scale, softcap)
        for kind in kinds
    ]


class AttentionSemanticsPass(ir.passes.InPlacePass):
    """Set window, scale and soft cap of every GroupQueryAttention to what the configuration says.

    Requires: one GroupQueryAttention per layer, in order.
    Ensures: `local_window_size`, `scale` and `softcap` as in `semantics_of(config)`; a window no sequence can
    reach (`max_seq_len`) is left out; sizes of heads and rotary tables that the kernel takes.
    """

    def __init__(self, config: dict[str, Any], max_seq_len: int) -> None:
        super().__init__()
        self.wanted = semantics_of(config)
        self.max_seq_len = max_seq_len

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = gqa.attentions(model.graph)
        if len(nodes) != len(self.wanted):
            raise UnsupportedModelError(f"{len(nodes)} attention nodes for {len(self.wanted)} layers")
        for node, wanted in zip(nodes, self.wanted, strict=True):
            _check_rotary(node)
            window = wanted.window if 0 < wanted.window < self.max_seq_len else -1
            node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", window)
            node.attributes["scale"] = ir.AttrFloat32("scale", wanted.scale)
            node.attributes["softcap"] = ir.AttrFloat32("softcap", wanted.softcap)
        return ir.passes.PassResult(model, modified=True)


def _check_rotary(node: ir.Node) -> None:
    """Hold the sizes of a rotary embedding to what the kernel takes; it reads off its tables how much to rotate."""
    told = node.attributes.pop("rotary_embedding_dim", None)
    table, past = gqa.given(node, gqa.Input.COS), gqa.given(node, gqa.Input.PAST_KEY)
    if table is None or table.shape is None or past is None or past.shape is None:
        return
    head, half = past.shape[3], table.shape[1]
    if isinstance(head, int) and isinstance(half, int) and (head % _ROTARY_UNIT or 2 * half % _ROTARY_UNIT):
        raise UnsupportedModelError(
            f"attention heads of size {head}, of which {2 * half} are rotated, do not fit ONNX Runtime's attention; "
            f"wanted multiples of {_ROTARY_UNIT}"
        )
    if told is not None and told.value not in (0, 2 * half):
        raise UnsupportedModelError(
            f"{told.value} entries of a head are rotated, and the rotary tables have {2 * half}"
        )


class LimitPositionsPass(ir.passes.InPlacePass):
    """Cut the rotary tables to `max_seq_len` rows: a long-context model's table is larger than its norms together.

    Requires: nothing; tables that are computed in the graph are left alone.
    Ensures: the same values for every position below `max_seq_len`.
    """

    def __init__(self, max_seq_len: int) -> None:
        super().__init__()
        self.max_seq_len = max_seq_len

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        tables = {
            table
            for node in gqa.attentions(model.graph)
            for table in (gqa.given(node, gqa.Input.COS), gqa.given(node, gqa.Input.SIN))
            if table is not None and table.const_value is not None
        }
        cut = False
        for table in tables:
            assert table.const_value is not None
            rows = table.const_value.numpy()
            if rows.shape[0] > self.max_seq_len:
                kept = rows[: self.max_seq_len].copy()
                table.const_value = ir.tensor(kept, name=table.name)
                table.shape = ir.Shape(kept.shape)
                cut = True
        return ir.passes.PassResult(model, modified=cut)
