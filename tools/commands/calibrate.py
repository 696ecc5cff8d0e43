"""`via-sd-export calibrate`: what passes cost on this machine, and what `auto` means there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from via_sd.masks.files import write_whole
from via_sd.runtime import EXACT_MODES, Pipeline
from via_sd.runtime.backends import ONNXRUNTIME
from via_sd.runtime.engine import FULL
from via_sd.runtime.policy import policy_file, policy_json, this_machine
from via_sd.tools.bench import PLAIN
from via_sd.tools.calibrate import candidates, choose, measure_costs, policy_of
from via_sd.tools.commands.demo import comparison
from via_sd.tools.console import command, err, out, print_json, progress_bar
from via_sd.tools.options import AsJson, Backend, Threads, TrustEngines
from via_sd.tools.prompts import read_prompts


@command
def calibrate(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.")],
    prompts: Annotated[Path, typer.Option(help='JSON lines, {"prompt": …, "bucket": …}: the kind of work to be done.')],
    max_divergence: Annotated[
        float | None,
        typer.Option(
            help="Try routed too, where no more than this share of tokens differs from the full verifier's.",
            show_default="exact modes only",
            min=0,
            max=1,
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of every answer.", min=2)] = 128,
    repeats: Annotated[int, typer.Option(help="Times every prompt is generated in the second round.", min=1)] = 2,
    threads: Threads = None,
    backend: Backend = ONNXRUNTIME,
    trust_engines: TrustEngines = False,
    as_json: AsJson = False,
) -> None:
    """Measure BUNDLE on this machine and PROMPTS, and keep what `auto` is to do there."""
    wanted = read_prompts(prompts)
    options: dict[str, Any] = {"backend": backend, "threads": threads, "trust_engines": trust_engines}
    with progress_bar() as progress:
        progress("loading", None)
        pipeline = Pipeline.load(bundle, max_sequences=1, use_policy=False, **options)
        progress("timing passes", None)
        costs = measure_costs(pipeline)
        pipeline.use(policy_of({"mode": PLAIN}, costs))
        tried = candidates(pipeline, max_divergence)
        winner, first, second = choose(
            pipeline,
            wanted,
            tried,
            max_divergence=max_divergence,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            progress=progress,
        )
    machine = this_machine(backend, threads)
    measured = {
        "prompts": len(wanted),
        "max_new_tokens": max_new_tokens,
        "step_ms": costs.step_ms,
        "first_round": first,
        "second_round": second,
    }
    facts = policy_json(pipeline.bundle, machine, policy_of(tried[winner], costs), measured)
    file = policy_file(pipeline.bundle, machine)
    file.parent.mkdir(exist_ok=True)
    write_whole(file, json.dumps(facts, indent=1) + "\n")
    if as_json:
        print_json({"policy": str(file), **facts})
        return
    out.print(_times(costs.step_ms))
    out.print(comparison(second, [label for label, each in tried.items() if each["mode"] not in EXACT_MODES]))
    out.print(f"auto is now [bold]{winner}[/] on this machine. {_verdict(pipeline, winner, first, second)}")
    err.print(f"wrote {file}", highlight=False)


def _times(step_ms: dict[str, dict[int, float]]) -> Table:
    sizes = list(step_ms[FULL])
    table = Table(title="milliseconds of a pass (over full's)", title_justify="left")
    table.add_column("tier")
    for size in sizes:
        table.add_column(f"{size} tokens" if size > 1 else "1 token", justify="right")
    for tier, times in step_ms.items():
        table.add_row(tier, *(f"{times[size]:.2f} ({times[size] / step_ms[FULL][size]:.2f})" for size in sizes))
    return table


def _verdict(pipeline: Pipeline, winner: str, first: dict[str, Any], second: dict[str, Any]) -> str:
    """Whether the slim tier pays, in words."""
    if pipeline.bundle.slim is None:
        return "The bundle has no slim-verifier."
    if winner not in (PLAIN, "speculative"):
        return "The slim tier pays here."
    figures = {**first, **second}
    slim = {label: each for label, each in figures.items() if label not in (PLAIN, "speculative")}
    label = max(slim, key=lambda name: slim[name]["all"]["tokens_per_s"]["median"])
    where = second if {label, "speculative"} <= set(second) else first
    ratio = where[label]["all"]["tokens_per_s"]["median"] / where["speculative"]["all"]["tokens_per_s"]["median"]
    return f"The slim tier does not pay here: the best mode with it, {label}, is {ratio:.2f}x of speculative."
