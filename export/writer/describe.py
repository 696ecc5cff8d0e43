"""What a bundle's manifest says of a graph: its inputs and outputs, and its KV buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from via_sd.contract.graphs import PARTS, PAST, PRESENT, kv_place
from via_sd.errors import ExportError, UnsupportedModelError


def describe_values(values: Sequence[ir.Value]) -> list[dict[str, Any]]:
    """Name, element type and shape of graph inputs or outputs; a dimension that varies is its name."""
    return [
        {
            "name": value.name,
            "dtype": value.dtype.numpy().name if value.dtype else None,
            "shape": [d if isinstance(d, int) else str(d.value) for d in value.shape or ()],
        }
        for value in values
    ]


def describe_kv(model: ir.Model) -> dict[str, Any]:
    """KV buffers of the full tier: [batch, heads, max_seq_len, head_dim], one key and one value per layer.

    Raises:
        ExportError: layers whose buffers differ in shape.
        UnsupportedModelError: a head size that ONNX Runtime's attention does not take.
    """
    places = {value: kv_place(value.name) for value in model.graph.inputs}
    keys = [value for value, place in places.items() if place is not None and place[1] == PARTS[0]]
    shapes = {tuple(d if isinstance(d, int) else None for d in key.shape or ()) for key in keys}
    if len(shapes) != 1:
        raise ExportError(f"layers differ in the shape of their KV cache: {sorted(map(str, shapes))}")
    _, heads, _, head_dim = shapes.pop()
    if head_dim is None or head_dim % 16:
        raise UnsupportedModelError(
            f"attention heads of size {head_dim}: ONNX Runtime's CPU attention takes multiples of 16"
        )
    dtype = keys[0].dtype
    assert dtype is not None
    return {
        "past": PAST,
        "present": PRESENT,
        "parts": list(PARTS),
        "num_layers": len(keys),
        "num_heads": heads,
        "head_dim": head_dim,
        "dtype": dtype.numpy().name,
    }
