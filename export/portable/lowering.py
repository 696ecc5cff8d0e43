"""Lower a bundle's decoder graph to the portable one.

exported graph (GroupQueryAttention, If, step lengths)
  -> UnroutePass        every If replaced by what it keeps
  -> UnpackTokensPass   one row of tokens per sequence
  -> PrunePass          the sublayers a mask skips left out
  -> AttentionPass      RotaryEmbedding, TensorScatter into a fixed cache, Attention with a mask made in the graph
  -> StandardNormPass   skip norms as Add and RMSNormalization
  -> HeadPass           logits in float32, a tied table stored as the head reads it
  -> CastPass           one dtype for weights, activations and KV
  -> RowNumbersPass     what greedy decoding and the router look at, so that logits can stay where they are
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from via_sd.errors import UnsupportedModelError
from via_sd.export.passes.pack_tokens import UnpackTokensPass
from via_sd.export.passes.prune import PrunePass
from via_sd.export.portable.attention import AttentionPass
from via_sd.export.portable.cast import CastPass
from via_sd.export.portable.head import HeadPass
from via_sd.export.portable.norms import StandardNormPass
from via_sd.export.portable.numbers import RowNumbersPass
from via_sd.export.portable.unroute import UnroutePass
from via_sd.masks import QUANTISED_STATES, Mask

#: First opset with TensorScatter and with Attention over a cache of fixed size.
OPSET = 24
#: Name -> element type of weights, activations and KV.
DTYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


def to_portable(
    model: ir.Model, *, max_seq_len: int, dtype: ir.DataType | str = "fp32", mask: Mask | None = None
) -> ir.Model:
    """The portable graph of `model`, full or as `mask` prunes it; `model` itself stays as it is.

    For its inputs and outputs see `via_sd.contract.graphs`. A token attends to the KV buffers up to its own position,
    whatever lies behind it; slots that a step reads beyond its last position cost time.

    Args:
        model: a decoder graph as an export leaves it (`lower` applied), routed or not, not quantised.
        max_seq_len: capacity of the KV caches in tokens.
        dtype: `fp32`, `fp16`, `bf16`, or the element type itself.
        mask: what to leave out; None for the full verifier. What the mask runs in fewer bits is in `dtype` too.

    Raises:
        UnsupportedModelError: an operator or an attention this graph cannot express.
    """
    result = model.clone()
    UnroutePass()(result)
    UnpackTokensPass()(result)
    if mask is not None:
        PrunePass(mask.keeping(*QUANTISED_STATES))(result)
    AttentionPass(max_seq_len)(result)
    StandardNormPass()(result)
    HeadPass()(result)
    RemoveUnusedNodesPass()(result)
    _check_operators(result.graph)
    CastPass(portable_dtype(dtype))(result)
    RowNumbersPass()(result)
    result.graph.opset_imports.clear()
    result.graph.opset_imports[""] = OPSET
    return result


def portable_dtype(dtype: ir.DataType | str) -> ir.DataType:
    """The element type called `dtype`; raises ValueError for one the portable graph is not made in."""
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}, wanted {', '.join(DTYPES)}")
        return DTYPES[dtype]
    if dtype not in DTYPES.values():
        raise ValueError(f"element type is {dtype.name}, wanted {', '.join(t.name for t in DTYPES.values())}")
    return dtype


def _check_operators(graph: ir.Graph) -> None:
    foreign = sorted(
        {f"{node.domain}.{node.op_type}" for node in graph.all_nodes() if node.domain not in ("", "ai.onnx")}
    )
    if foreign:
        raise UnsupportedModelError(
            f"the graph uses {', '.join(foreign)}, which standard ONNX does not have; a quantised bundle is built from "
            "its checkpoint (--reference), other operators mean that this model cannot be built for TensorRT"
        )
    branching = sorted({node.op_type for node in graph if node.op_type in ("If", "Loop", "Scan")})
    if branching:
        raise UnsupportedModelError(
            f"the graph has {', '.join(branching)} nodes that are not a mask's segments; "
            "a KV cache cannot be updated inside control flow"
        )
