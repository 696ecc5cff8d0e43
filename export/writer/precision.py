"""Precision of a bundle: which it is, and how a graph gets it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import numpy as np
import onnx_ir as ir

from via_sd.errors import ExportError
from via_sd.export.passes import QuantizePass
from via_sd.export.portable.cast import CastPass, float32_logits
from via_sd.export.sources.checkpoint import Checkpoint
from via_sd.progress import Progress

Precision = Literal["fp32", "fp16", "bf16", "int8", "int4"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8", "int4")
#: Precisions of weights, activations and KV alike; the others are of weights.
_HALF = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


def check_precision(precision: str | None) -> None:
    """Raise `ExportError` for a precision that no bundle has."""
    if precision is not None and precision not in PRECISIONS:
        raise ExportError(f"precision {precision!r} is not known; a bundle takes {', '.join(PRECISIONS)}")


def is_half(precision: str) -> bool:
    """Whether activations and KV are in 16 bits, as the weights are."""
    return precision in _HALF


def activations_of(wanted: str | None, precision: str, source: Checkpoint) -> str:
    """What a decoder in `precision` computes in between its weights: `fp32`, `fp16` or `bf16`.

    Args:
        wanted: `fp32`, `fp16`, or None for what goes with the precision.

    Raises:
        ExportError: no such choice with that precision, or with weights that came quantised.
    """
    usual = precision if is_half(precision) else "fp32"
    if wanted in (None, usual):
        return usual
    if wanted != "fp16" or not precision.startswith("int") or source.precision is not None:
        raise ExportError(
            f"activations in {wanted} do not go with weights in {precision}"
            f"{' that came quantised' if source.precision is not None else ''}; wanted {usual}, or fp16 with weights "
            "that the export quantises (--precision int8 or int4)"
        )
    return "fp16"


def precision_of(wanted: str | None, source: Checkpoint, name: str) -> str:
    """Precision of a decoder's weights: as asked, where they are not quantised already.

    Args:
        name: what the user calls the model, for the message.

    Raises:
        ExportError: weights that are quantised already, in another precision.
    """
    if source.precision is None:
        return wanted or "fp32"
    if wanted not in (None, source.precision):
        raise ExportError(
            f"the weights in {name} are {source.precision} already, wanted {wanted}: they are kept as they are, so "
            f"give --precision {source.precision}, or export from the unquantised model"
        )
    return source.precision


def quantise(
    model: ir.Model,
    precision: str,
    progress: Progress,
    energy: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> None:
    """Make the weights of a lowered float32 graph `int4` or `int8`, in place; for `energy` see `QuantizePass`."""
    QuantizePass(int(precision.removeprefix("int")), energy=energy, progress=progress)(model)


def halve(model: ir.Model, precision: str) -> None:
    """Make weights, activations and KV of a lowered float32 graph `fp16` or `bf16`, in place; logits stay float32.

    Weights are converted one by one when they are written.
    """
    float32_logits(model.graph)
    CastPass(_HALF[precision])(model)
