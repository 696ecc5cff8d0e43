"""Which tiers a bundle gets: masks read, held to their model and to one another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from via_sd.contract.graphs import FULL
from via_sd.errors import ExportError
from via_sd.masks import Mask, MaskFormat, ModelIdentity, read_mask


def resolve_mask(mask: Mask | str | Path, model: ModelIdentity, mask_format: MaskFormat | None) -> Mask:
    """`mask`, read if it is a file.

    Args:
        mask_format: what a bare array in a mask file means.

    Raises:
        MaskError: one that cannot be read, or does not fit `model`.
        ExportError: a name that is the verifier's, or states that are not exported.
    """
    if not isinstance(mask, Mask):
        mask = read_mask(mask, num_layers=model.num_layers, mask_format=mask_format)
    mask.check_model(model)
    if {*mask.states, mask.head} - {"keep", "skip"}:
        raise ExportError(f"mask '{mask.name}' has states other than keep and skip, which this release does not export")
    if mask.name == FULL:
        raise ExportError(f"a mask cannot be called '{FULL}': that is the verifier's own tier; rename the file")
    return mask


def drafter_mask(drafter: str, model: ModelIdentity, mask_format: MaskFormat | None) -> Mask | None:
    """The mask that the drafter is, if it is `mask:FILE`."""
    return resolve_mask(drafter.removeprefix("mask:"), model, mask_format) if drafter.startswith("mask:") else None


def check_nesting(masks: Sequence[Mask]) -> None:
    """Refuse tiers that would read KV which no tier above them wrote.

    Raises:
        ExportError: two masks of one name, or one that keeps attention which the mask before it skips.
    """
    for outer, inner in itertools.pairwise(masks):
        if inner.name == outer.name:
            raise ExportError(f"two masks are called '{inner.name}'; rename one of the files")
        if not inner.is_within(outer):
            extra = [
                layer
                for layer, (i, o) in enumerate(zip(inner.keep_attention, outer.keep_attention, strict=True))
                if i and not o
            ]
            raise ExportError(
                f"mask '{inner.name}' keeps the attention of layers {extra}, which '{outer.name}' skips: tiers share "
                "KV buffers, so every mask must keep a subset of the attention the mask before it keeps"
            )
