"""Options that several commands share, and the pipeline they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from via_sd.runtime import Pipeline
from via_sd.runtime.engines.backends import BACKENDS

Threads = Annotated[int | None, typer.Option(help="Threads of one pass.", show_default="physical cores", min=1)]
Backend = Annotated[str, typer.Option(help=f"What runs the bundle: {', '.join(BACKENDS)}.")]
Device = Annotated[
    str | None,
    typer.Option(help="What computes: cpu, cuda or cuda:N.", show_default="cuda with the [gpu] extra, otherwise cpu"),
]
TrustEngines = Annotated[
    bool, typer.Option("--trust-engines", help="Run TensorRT engines that were not built on this machine.")
]
PolicyFile = Annotated[
    Path | None,
    typer.Option("--policy", help="Go by this result of `calibrate`.", show_default="the bundle's for this machine"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object.")]


def load_pipeline(
    bundle: Path,
    *,
    backend: str,
    device: str | None,
    threads: int | None,
    trust_engines: bool,
    policy: Path | None,
) -> Pipeline:
    """The pipeline over `bundle` for one sequence at a time, as the options above have it."""
    return Pipeline.load(
        bundle,
        backend=backend,
        device=device,
        threads=threads,
        max_sequences=1,
        trust_engines=trust_engines,
        policy=True if policy is None else policy,
    )
