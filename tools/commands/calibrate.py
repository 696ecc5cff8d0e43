"""`via-sd-export calibrate`: what passes cost on this machine, and what `auto` means there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from via_sd.files import write_whole
from via_sd.runtime import load_bundle
from via_sd.runtime.engines.backends import ONNXRUNTIME, open_engines
from via_sd.runtime.engines.protocol import FULL
from via_sd.runtime.generation.policy import policy_file, policy_json, this_machine
from via_sd.tools.bench.prompts import read_prompts
from via_sd.tools.bench.report import comparison
from via_sd.tools.calibration.calibrate import (
    candidates,
    is_exact,
    measure_costs,
    pipeline_by,
    policy_of,
    run_rounds,
    slim_verdict,
    winner_of,
)
from via_sd.tools.commands.console import check_writable, command, err, out, print_json, progress_bar
from via_sd.tools.commands.options import AsJson, Backend, Threads, TrustEngines


@command
def calibrate(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.")],
    prompts: Annotated[Path, typer.Option(help='JSON lines, {"prompt": …, "bucket": …}: the kind of work to be done.')],
    max_divergence: Annotated[
        float | None,
        typer.Option(
            help="Try routed too, where no more than this share of tokens differs from the full verifier's; 0: exact "
            "modes only.",
            show_default="exact modes only",
            min=0,
            max=1,
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of every answer.", min=2)] = 128,
    repeats: Annotated[int, typer.Option(help="Times every prompt is generated in the second round.", min=1)] = 2,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Write the policy there.", show_default="into the bundle")
    ] = None,
    threads: Threads = None,
    backend: Backend = ONNXRUNTIME,
    trust_engines: TrustEngines = False,
    as_json: AsJson = False,
) -> None:
    """Measure BUNDLE on this machine and PROMPTS, and keep what `auto` is to do there."""
    wanted = read_prompts(prompts)
    loaded, machine = load_bundle(bundle), this_machine(backend, threads)
    file = out_file or policy_file(loaded, machine)
    check_writable(out_file or loaded.path / file.name)  # rather now than when everything was measured
    with progress_bar() as progress:
        progress("loading", None)
        verifier, drafter = open_engines(loaded, backend, threads=threads, trust_engines=trust_engines)
        progress("timing passes", None)
        costs = measure_costs(loaded, verifier, drafter)
        tried = candidates(loaded, max_divergence)
        rounds = run_rounds(
            pipeline_by(costs, loaded, verifier, drafter),
            wanted,
            tried,
            max_divergence=max_divergence,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            progress=progress,
        )
    measured = {
        "prompts": len(wanted),
        "max_new_tokens": max_new_tokens,
        "step_ms": costs.step_ms,
        "first_round": rounds.first,
        "second_round": rounds.second,
    }
    policy = policy_of(tried, rounds, max_divergence, costs)
    facts = policy_json(loaded, machine, policy, measured)
    file.parent.mkdir(exist_ok=True)
    write_whole(file, json.dumps(facts, indent=1) + "\n")
    if as_json:
        print_json({"policy": str(file), **facts})
        return
    out.print(_times(costs.step_ms))
    out.print(comparison(rounds.second, [label for label, each in tried.items() if not is_exact(each)]))
    verdict = slim_verdict(tried, rounds.second, max_divergence)
    out.print(f"auto is now [bold]{winner_of(rounds.second, max_divergence)}[/] here. {verdict}", highlight=False)
    if rounds.router is not None:
        shares = ", ".join(f"{share:.1%} ({margin:.2f})" for share, margin in rounds.router.margins.items()) or "none"
        out.print(f"router calibrated for a divergence (and slim's margin) of: {shares}", highlight=False)
        if rounds.router.gate(rounds.router.max_divergence).shut:
            err.print(
                f"that is none within {max_divergence:.1%}: slim and full differed too often, or too few tokens were "
                "judged; more prompts may help",
                highlight=False,
            )
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
