"""`via-sd-export calibrate`: measure forward pass latency on this machine, and choose what `auto` means there."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from via_sd.contract.graphs import FULL
from via_sd.runtime import load_bundle
from via_sd.runtime.generation.machine import this_machine
from via_sd.runtime.generation.policy_file import policy_file
from via_sd.tools.bench import comparison, prediction, read_prompts
from via_sd.tools.calibration import Calibration
from via_sd.tools.calibration import calibrate as run_calibration
from via_sd.tools.commands.console import check_writable, command, err, out, print_json, progress_bar
from via_sd.tools.commands.options import AsJson, EngineOptions, with_engine_options
from via_sd.tools.prediction import SyntheticTier


@command
@with_engine_options
def calibrate(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.")],
    prompts: Annotated[Path, typer.Option(help='JSON lines, {"prompt": …, "bucket": …}: the kind of work to be done.')],
    engines: EngineOptions,
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
    synthetic_acceptance: Annotated[
        float | None,
        typer.Option(
            help="Predict, too, what a drafter or a slim-verifier would do here that says this share of the full "
            "verifier's tokens and costs --synthetic-cost. It is never run.",
            show_default="none",
            min=0,
            max=1,
        ),
    ] = None,
    synthetic_cost: Annotated[
        float, typer.Option(help="Latency of its passes over the full verifier's.", min=0.001, max=10)
    ] = 0.4,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Write the policy there.", show_default="into the bundle")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure BUNDLE on this machine and PROMPTS, and keep what `auto` is to do there."""
    wanted = read_prompts(prompts)
    loaded = load_bundle(bundle)
    # Refused now rather than when everything is measured; the policy's folder in the bundle is made when it is written.
    check_writable(out_file or loaded.path / policy_file(loaded, this_machine(engines.backend, engines.threads)).name)
    with progress_bar() as progress:
        found = run_calibration(
            loaded,
            wanted,
            max_divergence=max_divergence,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            synthetic=None if synthetic_acceptance is None else SyntheticTier(synthetic_acceptance, synthetic_cost),
            progress=progress,
            **asdict(engines),
        )
    file = found.write(out_file)
    if as_json:
        print_json({"policy": str(file), **found.to_json()})
        return
    _show(found)
    err.print(f"wrote {file}", highlight=False)


def _show(found: Calibration) -> None:
    out.print(_times(found.costs.step_ms))
    out.print(comparison(found.rounds.second, found.approximate))
    if found.predicted is not None:
        out.print(prediction(found.predicted, found.rounds.second))
    out.print(Text.assemble("auto is now ", (found.winner, "bold"), f" here. {found.verdict}"), highlight=False)
    router = found.rounds.router
    if router is None:
        return
    shares = ", ".join(f"{share:.1%} ({margin:.2f})" for share, margin in router.margins.items()) or "none"
    out.print(f"router calibrated for a divergence (and slim's margin) of: {shares}", highlight=False)
    if router.gate(router.max_divergence).shut:
        err.print(
            f"no margin keeps within {router.max_divergence:.1%}: slim and full differed too often, or too few tokens "
            "were judged; more prompts may help",
            highlight=False,
        )


def _times(step_ms: dict[str, dict[int, float]]) -> Table:
    sizes = list(step_ms[FULL])
    table = Table(title="milliseconds of a pass (over full's)", title_justify="left")
    table.add_column("tier")
    for size in sizes:
        table.add_column(f"{size} tokens" if size > 1 else "1 token", justify="right")
    for tier, times in step_ms.items():
        table.add_row(tier, *(f"{times[size]:.2f} ({times[size] / step_ms[FULL][size]:.2f})" for size in sizes))
    return table
