"""`via-sd-export bench`: modes against plain decoding on the user's machine and prompts."""

from __future__ import annotations

import json
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from via_sd.masks.files import write_whole
from via_sd.runtime import MODES
from via_sd.runtime.backends import ONNXRUNTIME
from via_sd.runtime.policy import this_machine
from via_sd.tools.bench import run_bench, settings_of, summarise
from via_sd.tools.console import CommandError, command, err, out, progress_bar
from via_sd.tools.options import Backend, PolicyFile, Threads, TrustEngines, load_pipeline
from via_sd.tools.prompts import read_prompts
from via_sd.tools.report import comparison, write_report


@command
def bench(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.")],
    prompts: Annotated[Path, typer.Option(help='JSON lines, {"prompt": …, "bucket": …}.')],
    modes: Annotated[
        str | None, typer.Option(help="Comma-separated; plain is always measured too.", show_default="all there are")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of every answer.")] = 128,
    repeats: Annotated[int, typer.Option(help="Times every prompt is generated in every mode.")] = 3,
    alpha1: Annotated[float | None, typer.Option(help="Router: see generate.", show_default="0.5")] = None,
    alpha2: Annotated[float | None, typer.Option(help="Router: see generate.", show_default="0.3")] = None,
    router: Annotated[str, typer.Option(help="Router: see generate.")] = "adaptive",
    threads: Threads = None,
    backend: Backend = ONNXRUNTIME,
    trust_engines: TrustEngines = False,
    policy: PolicyFile = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure there.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the table there as HTML, with where it was measured.")
    ] = None,
) -> None:
    """Measure the decoding modes of BUNDLE on PROMPTS, greedy, modes in turn, in one run."""
    wanted = read_prompts(prompts)
    pipeline = load_pipeline(bundle, backend=backend, threads=threads, trust_engines=trust_engines, policy=policy)
    chosen = modes.split(",") if modes else [m for m in MODES if pipeline.bundle.slim or m not in ("cascade", "routed")]
    if unknown := sorted(set(chosen) - set(MODES)):
        raise CommandError(f"modes {', '.join(unknown)} are not known; modes are {', '.join(MODES)}")
    if max_new_tokens < 2 or repeats < 1:
        raise CommandError("--max-new-tokens must be 2 or more, --repeats 1 or more")
    with progress_bar() as progress:
        samples = run_bench(
            pipeline,
            wanted,
            settings_of(chosen),
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            progress=progress,
            alpha1=alpha1,
            alpha2=alpha2,
            router=router,
        )
    figures = summarise(samples, wanted)
    table = comparison(figures)
    out.print(table)
    if json_file:
        write_whole(json_file, json.dumps(figures, indent=1) + "\n")
    if report:
        machine = this_machine(backend, threads)
        facts = {
            "bundle": f"{bundle.resolve().name}, {pipeline.bundle.precision}",
            "tiers": ", ".join(pipeline.verifier.tiers),
            "drafter": pipeline.bundle.manifest["drafter"]["kind"],
            "machine": f"{machine.processor}, {machine.cores} cores, {platform.system()}",
            "backend": f"{backend}, {'all' if threads is None else threads} threads",
            "measured": f"{len(wanted)} prompts, {max_new_tokens} tokens, {repeats} repeats, greedy, modes in turn",
            "made by": f"via-sd-export {version('via-sd-export')}, {date.today().isoformat()}",
        }
        write_report(report, "Decoding modes", facts, table)
    for file in filter(None, (json_file, report)):
        err.print(f"wrote {file}", highlight=False)
