"""`via-sd-export triton`: bundle -> model repository for Triton Inference Server."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from via_sd.runtime import MODES, load_bundle
from via_sd.tools.console import CommandError, command, err


class Layout(str, Enum):
    """What becomes a Triton model."""

    pipeline = "pipeline"
    tiers = "tiers"


@command
def triton(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.")],
    repository: Annotated[Path, typer.Option(help="Model repository to add the model to; made if it is not there.")],
    name: Annotated[str, typer.Option(help="What clients call the model.")] = "via_sd",
    layout: Annotated[
        Layout,
        typer.Option(
            help="pipeline: one model that runs everything in one process. tiers: every tier a model of its own for "
            "Triton's ONNX Runtime backend, and one over them; slower, because KV travels with every step."
        ),
    ] = Layout.pipeline,
    mode: Annotated[str | None, typer.Option(help="Decoding mode of requests that name none.")] = None,
    slots: Annotated[int, typer.Option(help="Sequences that run at once in one instance.")] = 4,
    threads: Annotated[int | None, typer.Option(help="Threads of one engine step.")] = None,
    workers: Annotated[int, typer.Option(help="Engine steps that run at once in one instance.")] = 1,
    queue: Annotated[int, typer.Option(help="Requests that may wait for a slot.")] = 128,
    queue_timeout: Annotated[float | None, typer.Option(help="Seconds a request may wait for a slot.")] = None,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds a request may take in all.")] = None,
    chat_template: Annotated[
        bool,
        typer.Option("--chat-template", help="Put prompts through the chat template unless a request says not to."),
    ] = False,
    instances: Annotated[int, typer.Option(help="Processes that each load the bundle.")] = 1,
    gpu: Annotated[list[int] | None, typer.Option(help="Device for instances; repeat for several.")] = None,
    environment: Annotated[
        str | None, typer.Option(help="Python environment for the model, if it is not the server's own.")
    ] = None,
    copy: Annotated[bool, typer.Option("--copy/--no-copy", help="Copy the bundle, or name it by its path.")] = True,
    warm_up: Annotated[
        bool, typer.Option("--warm-up/--no-warm-up", help="Answer a request before being ready.")
    ] = True,
) -> None:
    """Write a Triton model repository that serves BUNDLE."""
    from via_sd.export.triton import ServingOptions, write_repository, write_tiers

    if mode is not None and mode not in ("auto", *MODES):
        raise CommandError(f"mode {mode!r} is not known; modes are auto, {', '.join(MODES)}")
    load_bundle(bundle)
    options = ServingOptions(
        mode=mode,
        slots=slots,
        workers=workers,
        threads=threads,
        queue=queue,
        queue_timeout=queue_timeout,
        request_timeout=request_timeout,
        apply_chat_template=chat_template,
        instances=instances,
        gpus=tuple(gpu or ()),
        environment=environment,
    )
    if layout is Layout.pipeline:
        folder = write_repository(bundle, repository, name=name, options=options, copy=copy, warm_up=warm_up)
    else:
        folder = write_tiers(bundle, repository, name=name, options=options, copy=copy)
    err.print(f"wrote {folder}; serve it with: tritonserver --model-repository={repository.resolve()}", highlight=False)
