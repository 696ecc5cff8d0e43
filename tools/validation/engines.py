"""Compare the tiers of one engine with those of another over the same bundle."""

from __future__ import annotations

from typing import Any

import numpy as np

from via_sd.export.writer.check import compare_logits
from via_sd.runtime.engines.protocol import Engine
from via_sd.runtime.engines.rows import logits_of

#: Prefill, five tokens at an offset, single tokens, a long step.
STEPS = (40, 5, 1, 1, 24)


def compare_tiers(found: Engine, wanted: Engine, vocabulary: int) -> dict[str, dict[str, Any]]:
    """Every tier's logits against a reference's, in steps of several sizes.

    Returns:
        Per tier: `max_abs_difference` of logits, `mean_kl` in nats, `top1_agreement`.
    """
    tokens = np.random.default_rng(0).integers(0, vocabulary, sum(STEPS)).tolist()
    results = {}
    for tier in found.tiers:
        both = found.new_buffers(), wanted.new_buffers()
        logits: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        past = 0
        for count in STEPS:
            for buffers, kept in zip(both, logits, strict=True):
                kept.append(logits_of(buffers.forward(tier, tokens[past : past + count], past, count)))
            past += count
        found_logits, wanted_logits = (np.concatenate(kept) for kept in logits)
        results[tier] = compare_logits(found_logits, wanted_logits).to_json()
    return results
