"""Which tiers a bundle gets: masks read, held to their model, to its precision and to one another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from via_sd.contract.graphs import FULL
from via_sd.errors import ExportError
from via_sd.export.writer.precision import is_half
from via_sd.masks import QUANTISED_STATES, Mask, MaskFormat, ModelIdentity, read_mask

_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4}


def resolve_mask(mask: Mask | str | Path, model: ModelIdentity, mask_format: MaskFormat | None) -> Mask:
    """`mask`, read if it is a file.

    Args:
        mask_format: what a bare array in a mask file means.

    Raises:
        MaskError: one that cannot be read, or does not fit `model`.
        ExportError: a name that is the verifier's.
    """
    if not isinstance(mask, Mask):
        mask = read_mask(mask, num_layers=model.num_layers, mask_format=mask_format)
    mask.check_model(model)
    if mask.name == FULL:
        raise ExportError(f"a mask cannot be called '{FULL}': that is the verifier's own tier; rename the file")
    return mask


def drafter_mask(drafter: str, model: ModelIdentity, mask_format: MaskFormat | None) -> Mask | None:
    """The mask that the drafter is, if it is `mask:FILE`."""
    return resolve_mask(drafter.removeprefix("mask:"), model, mask_format) if drafter.startswith("mask:") else None


def check_precisions(mask: Mask, precision: str, *, quantised_source: bool, activations: str = "fp32") -> None:
    """Refuse a tier in more bits than full, or in fewer than weights that came quantised, and bridges in 16 bits.

    Args:
        precision: of full.
        quantised_source: the weights came quantised.
        activations: of every tier.

    Raises:
        ExportError: with what the mask may name.
    """
    if is_half(activations) and mask.bridges:
        raise ExportError(
            f"mask '{mask.name}' has bridges, which are fitted in float32, and activations are {activations}; give "
            "activations in fp32, or a mask without bridges"
        )
    if quantised_source:
        allowed, reason = {precision}, "weights that come quantised are kept as they are"
    else:
        allowed = {state for state in QUANTISED_STATES if _BITS[state] <= _BITS[precision]}
        reason = "a tier has no more bits than full"
    wrong = [state for state in mask.precisions if state not in allowed]
    if wrong:
        raise ExportError(
            f"mask '{mask.name}' runs sublayers or the LM head in {', '.join(wrong)}, and full is {precision}: "
            f"{reason}; wanted {', '.join(['keep', *sorted(allowed)])}"
        )


def slim_in_precision(tiers: Sequence[Mask], wanted: str, precision: str, model: ModelIdentity) -> list[Mask]:
    """`tiers` with everything that the first of them, the slim-verifier, keeps in the precision `wanted`.

    Without a mask the slim-verifier is the whole model in that precision. Full is in `precision`.

    Raises:
        ExportError: no such precision, or a slim-verifier that would be full itself.
    """
    state = next((known for known in QUANTISED_STATES if known == wanted), None)
    if state is None:
        raise ExportError(f"slim precision {wanted!r} is not known; wanted {', '.join(QUANTISED_STATES)}")
    if not tiers and wanted == precision:
        raise ExportError(
            f"a slim-verifier of the whole model in {wanted} computes what full computes, which is {precision} too; "
            "give another --slim-precision, or a --mask"
        )
    slim = tiers[0] if tiers else Mask.from_layers([True] * model.num_layers, model=model)
    return [slim.in_precision(state), *tiers[1:]]


def check_nesting(masks: Sequence[Mask]) -> None:
    """Refuse tiers that would read KV which no tier above them wrote.

    Raises:
        ExportError: two masks of one name, or one that runs attention which the mask before it leaves out.
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
                f"mask '{inner.name}' runs the attention of layers {extra}, which '{outer.name}' leaves out: tiers "
                "share KV buffers, and attention writes them in any precision, so every mask must run a subset of the "
                "attention that the mask before it runs"
            )
