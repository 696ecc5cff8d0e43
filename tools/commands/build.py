"""`via-sd-export build`: bundle -> TensorRT engines."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from via_sd.runtime import load_bundle
from via_sd.tools.commands.console import CommandError, command, out, print_json, progress_bar
from via_sd.tools.commands.engine_build import Dtype, build_here
from via_sd.tools.commands.options import AsJson


class Target(StrEnum):
    """Which TensorRT the engines are for."""

    rtx = "tensorrt-rtx"
    tensorrt = "tensorrt"


class Profiles(StrEnum):
    """Optimisation profiles of an engine."""

    joint = "joint"
    separate = "separate"


@command
def build(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory; the engines go into it.")],
    target: Annotated[Target, typer.Option(help="Which TensorRT the engines are for.")] = Target.rtx,
    dtype: Annotated[Dtype, typer.Option(help="Of weights, activations and KV.")] = Dtype.bf16,
    reference: Annotated[
        str | None, typer.Option(help="The verifier's checkpoint; needed when the bundle is quantised.")
    ] = None,
    drafter_reference: Annotated[str | None, typer.Option(help="Likewise for a model drafter.")] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="MIN,OPT,MAX", help="Tokens of a verify step.", show_default="1,8,96")
    ] = None,
    prefill: Annotated[
        str | None, typer.Option(metavar="MIN,OPT,MAX", help="Tokens of a prefill chunk.", show_default="1,256,512")
    ] = None,
    profiles: Annotated[
        Profiles | None,
        typer.Option(
            help="One optimisation profile for every step size, or one each for single step, verify and prefill.",
            show_default="joint for tensorrt-rtx, separate for tensorrt",
        ),
    ] = None,
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(help="GPU to build for, such as 8.9; repeat for more. TensorRT for RTX only.", show_default="all"),
    ] = None,
    version_compatible: Annotated[
        bool, typer.Option("--version-compatible", help="Let later versions of the library run the engines.")
    ] = False,
    embed_weights: Annotated[
        bool, typer.Option("--embed-weights", help="Put the weights into every engine instead of sharing one copy.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Build engines for every tier of BUNDLE, over one weights file; what has not changed is not built again."""
    load_bundle(bundle)
    with progress_bar() as progress:
        result = build_here(
            bundle,
            target.value,
            dtype=dtype.value,
            tokens=_sizes("--tokens", tokens),
            prefill=_sizes("--prefill", prefill),
            separate_profiles=None if profiles is None else profiles is Profiles.separate,
            compute_capabilities=compute_capability or (),
            version_compatible=version_compatible,
            embed_weights=embed_weights,
            reference=reference,
            drafter_reference=drafter_reference,
            progress=progress,
        )
    files, engines = result.manifest["files"], result.manifest["engines"]
    facts: dict[str, Any] = {
        "path": str(result.path),
        "target": target.value,
        "dtype": dtype.value,
        "library": result.manifest["request"]["library"],
        "weights_bytes": files[result.manifest["weights"]["file"]]["size"],
        "engines": {
            name: {
                "plan": entry["plan"],
                "bytes": files[entry["plan"]]["size"],
                "built": name in result.built,
                "build_seconds": entry["build_seconds"],
            }
            for name, entry in engines.items()
        },
    }
    if as_json:
        print_json(facts)
        return
    _show(facts)


def _sizes(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise CommandError(f"{option} is {text!r}, wanted three numbers: MIN,OPT,MAX") from None


def _show(facts: dict[str, Any]) -> None:
    library = facts["library"]
    table = Table(title=f"{facts['dtype']}, {library['name']} {library['version']}", title_justify="left")
    for heading in ("engine", "MB", "seconds", ""):
        table.add_column(heading, justify="left" if heading in ("engine", "") else "right")
    for name, engine in facts["engines"].items():
        state = "built" if engine["built"] else "unchanged"
        table.add_row(name, f"{engine['bytes'] / 1e6:.1f}", f"{engine['build_seconds']:.1f}", state)
    table.add_row("weights", f"{facts['weights_bytes'] / 1e6:.1f}", "", "one copy for all of them")
    out.print(table)
    out.print(f"{facts['path']}: built, not run", style="dim", highlight=False)
