"""How many tokens a KV buffer of a bundle holds."""

from __future__ import annotations

from typing import Any

from via_sd.errors import ExportError

DEFAULT_MAX_SEQ_LEN = 4096


def capacity(wanted: int | None, config: dict[str, Any], at_most: int = DEFAULT_MAX_SEQ_LEN) -> int:
    """Capacity of a KV buffer in tokens: `wanted`, or by default the model's limit, `at_most` at most.

    Raises:
        ExportError: `wanted` is beyond the model's limit, or leaves no room for an answer.
    """
    limit = int(config.get("max_position_embeddings") or at_most)
    if wanted is None:
        return min(limit, at_most)
    if not 2 <= wanted <= limit:
        raise ExportError(f"--max-seq-len is {wanted}, wanted 2 to {limit}, the model's own limit")
    return wanted
