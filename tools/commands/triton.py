"""`via-sd-export triton`: bundle -> model repository for Triton Inference Server."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from via_sd.contract.generation_options import refuse_routing
from via_sd.contract.mode_names import CALIBRATED, SLIM_MODES
from via_sd.contract.served_model import parse_default, runtime_options
from via_sd.runtime import Bundle, GenerationConfig, load_bundle
from via_sd.runtime.engines.backends import BACKENDS
from via_sd.tools.commands.console import CommandError, command, err
from via_sd.tools.commands.generation_options import split_settings


class Layout(StrEnum):
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
    default: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="What requests leave out, such as max_tokens=512 or max_divergence=0.02; repeat for more.",
        ),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help=f"What runs the graphs: {', '.join(BACKENDS)}.", show_default="onnxruntime")
    ] = None,
    trust_engines: Annotated[
        bool, typer.Option("--trust-engines", help="Let the server run TensorRT engines that were not built on it.")
    ] = False,
    slots: Annotated[int, typer.Option(help="Sequences that run at once in one instance.")] = 4,
    threads: Annotated[int | None, typer.Option(help="Threads of one engine step.")] = None,
    queue: Annotated[int, typer.Option(help="Requests that may wait for a slot.")] = 128,
    queue_timeout: Annotated[float | None, typer.Option(help="Seconds a request may wait for a slot.")] = None,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds a request may take in all.")] = None,
    chat_template: Annotated[
        bool,
        typer.Option("--chat-template", help="Put prompts through the chat template unless a request says not to."),
    ] = False,
    unsigned_counts: Annotated[
        bool,
        typer.Option(
            "--unsigned-counts", help="Take whole numbers as UINT32, as LangChain's connector sends them, not as INT32."
        ),
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

    if backend is not None and backend not in BACKENDS:
        raise CommandError(f"backend {backend!r} is not known; backends are {', '.join(BACKENDS)}")
    defaults = _defaults(mode, default or [])
    _check_defaults(defaults, load_bundle(bundle), layout)
    options = ServingOptions(
        defaults=defaults,
        backend=backend,
        trust_engines=trust_engines,
        slots=slots,
        threads=threads,
        queue=queue,
        queue_timeout=queue_timeout,
        request_timeout=request_timeout,
        apply_chat_template=chat_template,
        instances=instances,
        gpus=tuple(gpu or ()),
        environment=environment,
        unsigned_counts=unsigned_counts,
    )
    if layout is Layout.pipeline:
        folder = write_repository(bundle, repository, name=name, options=options, copy=copy, warm_up=warm_up)
    else:
        folder = write_tiers(bundle, repository, name=name, options=options, copy=copy)
    err.print(f"wrote {folder}; serve it with: via-sd-export serve {repository}", highlight=False, soft_wrap=True)


def _defaults(mode: str | None, given: list[str]) -> dict[str, str]:
    defaults = {} if mode is None else {"mode": mode}
    return {**defaults, **dict(split_settings(given, "--default"))}


def _check_defaults(defaults: dict[str, str], bundle: Bundle, layout: Layout) -> None:
    """Refuses what the model would refuse when it is loaded, or with every request."""
    try:
        options = runtime_options({name: parse_default(name, text) for name, text in defaults.items()})
    except ValueError as error:
        raise CommandError(f"--default: {error}") from None
    config = GenerationConfig(**options)
    refuse_routing(config)
    if config.mode in SLIM_MODES and bundle.slim is None:
        raise CommandError(f"mode {config.mode} needs a slim-verifier, and {bundle.path} was exported without a mask")
    if layout is Layout.tiers and config.router == CALIBRATED:
        raise CommandError(
            "router calibrated goes by calibrate, which the graphs of --layout tiers do not pass through"
        )
