"""`via-sd-export export`: checkpoint or ONNX decoder -> bundle."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from via_sd.tools.commands.console import command, err, progress_bar


class Precision(StrEnum):
    """Weights of a bundle; in 16 bits activations and KV, too."""

    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"
    int8 = "int8"
    int4 = "int4"


class SlimPrecision(StrEnum):
    """Weights of the slim-verifier, where they are not the verifier's."""

    int8 = "int8"
    int4 = "int4"


class Activations(StrEnum):
    """Activations and KV beside quantised weights."""

    fp32 = "fp32"
    fp16 = "fp16"


class MaskMeaning(StrEnum):
    """What a bare array in a mask file lists."""

    keep = "keep"
    skip = "skip"


@command
def export(
    verifier: Annotated[
        str, typer.Argument(help="Hugging Face directory, hub id, GGUF file, or ONNX decoder's directory.")
    ],
    out: Annotated[Path, typer.Option(help="Bundle directory to create.")],
    mask: Annotated[
        list[Path] | None,
        typer.Option(help="Mask file; the first is the slim-verifier. Repeat for more, each within the one before."),
    ] = None,
    mask_format: Annotated[
        MaskMeaning | None, typer.Option(help="What a bare array in a mask file lists: layers to keep, or to skip.")
    ] = None,
    drafter: Annotated[
        str, typer.Option(help="`ngram`, `mask:FILE` (a deeper mask of the verifier), or a model with its vocabulary.")
    ] = "ngram",
    precision: Annotated[
        Precision | None,
        typer.Option(
            help="Float32; 16 bits for weights, activations and KV; or weight-only int8 or int4.",
            show_default="fp32, or what an ONNX decoder has",
        ),
    ] = None,
    slim_precision: Annotated[
        SlimPrecision | None,
        typer.Option(
            help="Weights of the slim-verifier, LM head included: the first mask, or without one the whole model.",
            show_default="those of the verifier",
        ),
    ] = None,
    activations: Annotated[
        Activations | None,
        typer.Option(help="Activations and KV beside int8 or int4 weights.", show_default="fp32"),
    ] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(help="Capacity of a KV buffer in tokens.", show_default="the model's, at most 4096")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="File with a Jinja chat template.", show_default="the model's own")
    ] = None,
    check: Annotated[bool, typer.Option(help="Compare with transformers (an ONNX decoder: with itself) first.")] = True,
) -> None:
    """Export VERIFIER, its slim-verifiers and its drafter to one bundle."""
    from via_sd.export import export_bundle

    with progress_bar() as progress:
        path = export_bundle(
            verifier,
            out,
            masks=mask or [],
            mask_format=mask_format.value if mask_format else None,
            drafter=drafter,
            precision=precision.value if precision else None,
            slim_precision=slim_precision.value if slim_precision else None,
            activations=activations.value if activations else None,
            max_seq_len=max_seq_len,
            chat_template=chat_template,
            check=check,
            progress=progress,
        )
    err.print(f"wrote {path}", highlight=False)
