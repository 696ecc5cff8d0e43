"""`via-sd-export validate`: does what runs a bundle compute what transformers computes from its checkpoint?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from via_sd.runtime import load_bundle
from via_sd.runtime.engines.backends import ONNXRUNTIME
from via_sd.tools.commands.console import CheckFailedError, command, out, print_json, progress_bar
from via_sd.tools.commands.options import AsJson, Backend, Device, TrustEngines

if TYPE_CHECKING:
    from via_sd.tools.validation import TierReport

#: What is shown of an output.
_FIGURES = ("max_abs", "mean_abs", "median_abs", "mean_rel", "median_rel")


@command
def validate(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.")],
    reference: Annotated[str, typer.Option(help="The verifier's checkpoint: directory, hub id, or GGUF file.")],
    drafter_reference: Annotated[
        str | None, typer.Option(help="A model drafter's checkpoint; the drafter is left out without it.")
    ] = None,
    backend: Backend = ONNXRUNTIME,
    device: Device = None,
    layers: Annotated[
        int | None, typer.Option(help="Compare keys and values of the first N layers.", show_default="all", min=0)
    ] = None,
    atol: Annotated[float | None, typer.Option(help="Absolute tolerance.", show_default="by precision")] = None,
    rtol: Annotated[float | None, typer.Option(help="Relative tolerance.", show_default="by precision")] = None,
    trust_engines: TrustEngines = False,
    as_json: AsJson = False,
) -> None:
    """Compare every tier of BUNDLE with transformers: logits, keys and values, NaN and infinity."""
    loaded = load_bundle(bundle)
    from via_sd.tools.validation import validate as run_validation  # needs the `export` extra

    with progress_bar() as progress:
        found = run_validation(
            loaded,
            reference,
            drafter_reference=drafter_reference,
            backend=backend,
            device=device,
            trust_engines=trust_engines,
            absolute=atol,
            relative=rtol,
            layers=layers,
            progress=progress,
        )
    if as_json:
        print_json(found.to_json())
    else:
        for name, reports in found.models.items():
            _show(f"{name} on {backend}, {found.precision}, against transformers", reports)
        if found.not_compared:
            tiers = ", ".join(found.not_compared)
            out.print(f"not compared: {tiers} (transformers has nothing like a bridge)", highlight=False)
    if found.failed:
        failed = "; ".join(f"{report.tier} ({_reason(report)})" for report in found.failed)
        raise CheckFailedError(f"not what transformers computes: {failed}")


def _reason(report: TierReport) -> str:
    if not report.finite:
        return "NaN or infinity"
    wrong = [output.name for output in report.outputs if not output.passed]
    first = next((name for name in wrong if "layer" in name), wrong[0])
    return f"{len(wrong)} of {len(report.outputs)} outputs, first {first}"


def _show(title: str, reports: list[TierReport]) -> None:
    """Logits of every step; of keys and values those that differ, and the largest figures of the others."""
    table = Table(title=title, title_justify="left")
    for heading in ("tier", "output", *_FIGURES, ""):
        table.add_column(heading.replace("_", " "), justify="right" if heading in _FIGURES else "left")
    for report in reports:
        layers = [output for output in report.outputs if "layer" in output.name and output.passed]
        for output in report.outputs:
            if output not in layers:
                figures = (f"{getattr(output, name):.2g}" for name in _FIGURES)
                table.add_row(report.tier, output.name, *figures, "" if output.passed else Text("differs", "red"))
        if layers:
            worst = (f"{max(getattr(output, name) for output in layers):.2g}" for name in _FIGURES)
            table.add_row(report.tier, f"worst of {len(layers)} keys and values", *worst, "")
    out.print(table)
    for report in reports:
        finite = "no NaN or infinity" if report.finite else "NaN or infinity found"
        agreement = f"KL {report.mean_kl:.2g} nats, same likeliest token at {report.top1_agreement:.1%} of positions"
        out.print(f"{report.tier}: {agreement}, {finite}", highlight=False)
