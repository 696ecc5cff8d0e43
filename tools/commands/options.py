"""Options of what runs a bundle, which several commands have, and the pipeline they ask for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from via_sd.runtime import Pipeline
from via_sd.runtime.engines.backends import BACKENDS, ONNXRUNTIME
from via_sd.tools.commands.option_groups import options_of, with_group

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


@dataclass(frozen=True)
class EngineOptions:
    """What runs the graphs of a bundle."""

    threads: Threads = None
    backend: Backend = ONNXRUNTIME
    device: Device = None
    trust_engines: TrustEngines = False


@dataclass(frozen=True)
class PipelineOptions(EngineOptions):
    """What runs a bundle, and the policy it goes by."""

    policy: PolicyFile = None

    def load(self, bundle: Path) -> Pipeline:
        """The pipeline over `bundle` for one sequence at a time."""
        options = asdict(self) | {"policy": True if self.policy is None else self.policy}
        return Pipeline.load(bundle, max_sequences=1, **options)


#: The parameter `engines` of a command becomes the options of `EngineOptions`.
with_engine_options = with_group("engines", options_of(EngineOptions), EngineOptions)
#: The parameter `runtime` of a command becomes the options of `PipelineOptions`.
with_pipeline_options = with_group("runtime", options_of(PipelineOptions), PipelineOptions)
