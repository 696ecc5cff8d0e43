"""The KV buffers of a decoder: their names in its graphs, their shape, their element type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from via_sd.contract.graphs import PARTS, PAST, PRESENT, kv_bytes_per_token
from via_sd.contract.values import DIMENSION, Contract, Value, one_of

#: What a manifest says of KV buffers.
KV: Contract = {
    "past": one_of(PAST),
    "present": one_of(PRESENT),
    "parts": Value(f"{list(PARTS)}", lambda value: value == list(PARTS)),
    "num_layers": DIMENSION,
    "num_heads": DIMENSION,
    "head_dim": DIMENSION,
    "dtype": one_of("float32", "float16", "bfloat16"),
}


def kv_bytes(manifest: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of KV `per_token`, and `per_sequence` as long as it may get: of all tiers, and of a drafter of its own."""
    verifier, drafter = manifest["verifier"], manifest["drafter"]
    per_token = kv_bytes_per_token(verifier["kv"])
    found = {"per_token": per_token, "per_sequence": per_token * manifest["max_seq_len"]}
    if drafter["kind"] == "model":
        of_drafter = kv_bytes_per_token(drafter["kv"])
        found["per_token"] += of_drafter
        found["per_sequence"] += of_drafter * drafter["max_seq_len"]
    return found
