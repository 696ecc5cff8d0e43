"""`via-sd-export bench`: modes against plain decoding on the user's machine and prompts."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from via_sd.contract.generation_options import for_mode
from via_sd.contract.kv import kv_bytes
from via_sd.contract.mode_names import AUTO, CALIBRATED
from via_sd.files import write_whole
from via_sd.runtime import EXACT_MODES, MODES, GenerationConfig, Pipeline
from via_sd.runtime.decoding.router import Gates
from via_sd.runtime.generation.machine import this_machine
from via_sd.runtime.generation.policy_file import measured_files
from via_sd.tools.bench import Report, comparison, read_prompts, run_bench, settings_of, summarise
from via_sd.tools.bench.forecast import forecast_bench
from via_sd.tools.commands.console import CommandError, check_writable, command, err, out, progress_bar
from via_sd.tools.commands.generation_options import read_settings
from via_sd.tools.commands.options import PipelineOptions, with_pipeline_options
from via_sd.tools.plotting import pyplot
from via_sd.tools.prediction import measure_costs

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


@command
@with_pipeline_options
def bench(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.")],
    prompts: Annotated[Path, typer.Option(help='JSON lines, {"prompt": …, "bucket": …}.')],
    runtime: PipelineOptions,
    modes: Annotated[
        str | None,
        typer.Option(help="Comma-separated, auto too; plain is always measured.", show_default="all there are"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of every answer.")] = 128,
    repeats: Annotated[int, typer.Option(help="Times every prompt is generated in every mode.")] = 3,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="An option of every generation, such as router=paper, alpha2=0.9 or temperature=0.7: see generate. "
            "Repeat for more.",
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure there.")] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Write a page there: tables, plots, prediction, memory, and where it was measured. Needs matplotlib."
        ),
    ] = None,
) -> None:
    """Measure the decoding modes of BUNDLE on PROMPTS, greedy, modes in turn, in one run."""
    wanted = read_prompts(prompts)
    pipeline = runtime.load(bundle)
    chosen = _modes(modes, pipeline)
    if max_new_tokens < 2 or repeats < 1:
        raise CommandError("--max-new-tokens must be 2 or more, --repeats 1 or more")
    options = read_settings(settings or [], "--set")
    if fixed := sorted({"mode", "max_new_tokens"} & options.keys()):
        raise CommandError(f"--set {fixed[0]}: use --modes and --max-new-tokens")
    configs = {mode: pipeline.resolve(GenerationConfig(**for_mode({"mode": mode, **options}))) for mode in chosen}
    check_writable(json_file, report)
    if report:
        pyplot()  # a missing matplotlib is reported now rather than when everything is measured
    with progress_bar() as progress:
        samples = run_bench(
            pipeline,
            wanted,
            settings_of(chosen),
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            progress=progress,
            **options,
        )
    figures = summarise(samples, wanted)
    approximate = [mode for mode, config in configs.items() if config.mode not in EXACT_MODES]
    described = {mode: _described(c) for mode, c in configs.items() if c.mode == "routed" or mode == AUTO}
    out.print(comparison(figures, approximate))
    for mode, text in described.items():
        out.print(f"{mode}: {text}", highlight=False)
    if json_file:
        write_whole(json_file, json.dumps(figures, indent=1) + "\n")
    if report:
        with progress_bar() as progress:
            progress("timing passes", None)
            costs = measure_costs(pipeline.bundle, pipeline.verifier, pipeline.drafter)
            progress("predicting", None)
            labelled = {mode: {"mode": mode, **options} for mode in chosen}
            predicted = forecast_bench(pipeline, wanted, labelled, samples, costs)
        Report(
            samples,
            figures,
            approximate,
            costs.step_ms,
            _megabytes(pipeline),
            predicted,
            f"{len(wanted)} prompts, {max_new_tokens} tokens, {repeats} repeats, {_sampling(options)}, modes in turn",
            {**_circumstances(pipeline, runtime), **described, **_made_by(pipeline, runtime.backend)},
        ).write(report)
    for file in filter(None, (json_file, report)):
        err.print(f"wrote {file}", highlight=False)


def _modes(text: str | None, pipeline: Pipeline) -> list[str]:
    """The modes that were named, or those that the bundle has."""
    if text is None:
        return [mode for mode in MODES if pipeline.bundle.slim or mode not in ("cascade", "routed")]
    modes = text.split(",")
    if unknown := sorted(set(modes) - {AUTO, *MODES}):
        raise CommandError(f"modes {', '.join(unknown)} are not known; modes are {', '.join((AUTO, *MODES))}")
    return modes


def _circumstances(pipeline: Pipeline, runtime: PipelineOptions) -> dict[str, object]:
    """What was measured, and where."""
    machine = this_machine(runtime.backend, runtime.threads)
    return {
        "bundle": f"{pipeline.bundle.path.resolve().name}, {pipeline.bundle.precision}",
        "tiers": ", ".join(pipeline.verifier.tiers),
        "drafter": pipeline.bundle.manifest["drafter"]["kind"],
        "machine": f"{machine.processor}, {machine.cores} cores, {platform.system()}",
        "backend": f"{runtime.backend}, {'all' if runtime.threads is None else runtime.threads} threads",
    }


def _made_by(pipeline: Pipeline, backend: str) -> dict[str, object]:
    packages = ("via-sd-export", "onnxruntime", "onnxruntime-gpu", "tensorrt-rtx", "numpy")
    return {
        "files": f"SHA-256 {measured_files(pipeline.bundle, backend)}",
        "versions": ", ".join([*_versions(packages), f"Python {platform.python_version()}"]),
        "made": f"{date.today().isoformat()}, {shlex.join(sys.argv)}",
    }


def _versions(packages: Iterable[str]) -> Iterator[str]:
    for package in packages:
        with suppress(PackageNotFoundError):
            yield f"{package} {version(package)}"


def _megabytes(pipeline: Pipeline) -> dict[str, float]:
    """Weights by the tier that brings them, KV of a sequence as long as it may get, and the process at its largest."""
    tiers = pipeline.bundle.manifest["verifier"]["tiers"]
    found = {f"weights of {name}": tier["added_bytes"] / 1e6 for name, tier in tiers.items()}
    found["KV of the longest sequence"] = kv_bytes(pipeline.bundle.manifest)["per_sequence"] / 1e6
    if resource is not None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found["process, peak"] = peak * (1 if sys.platform == "darwin" else 1024) / 1e6
    return found


def _sampling(options: Mapping[str, object]) -> str:
    given = ", ".join(f"{name}={value}" for name, value in options.items())
    return given or "greedy"


def _described(config: GenerationConfig) -> str:
    """The mode and, of `routed`, what its router goes by."""
    if config.mode != "routed":
        return config.mode
    gates = Gates.of(config)
    by = "slim's margins" if config.router == CALIBRATED else f"alpha1 {gates.alpha1:g}, alpha2 {gates.alpha2:g}"
    limit = "" if config.max_divergence is None else f", divergence at most {config.max_divergence:.1%}"
    return f"routed, router {config.router or 'adaptive'}, {by}{limit}"
