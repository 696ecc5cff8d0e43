"""The command line: `via-sd-export VERB …`."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from via_sd.tools.commands.bench import bench
from via_sd.tools.commands.build import build
from via_sd.tools.commands.calibrate import calibrate
from via_sd.tools.commands.chat import chat
from via_sd.tools.commands.demo import demo
from via_sd.tools.commands.export import export
from via_sd.tools.commands.generate import generate
from via_sd.tools.commands.inspect import inspect
from via_sd.tools.commands.score import score
from via_sd.tools.commands.search import search
from via_sd.tools.commands.serve import serve
from via_sd.tools.commands.triton import triton
from via_sd.tools.commands.validate import validate

app = typer.Typer(
    name="via-sd-export",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"via-sd-export {version('via-sd-export')}")
        raise typer.Exit


@app.callback()
def _main(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """VIA-SD speculative decoding: export a verifier and its slim-verifier over one set of weights, and run them."""


for verb in (export, search, generate, chat, score, calibrate, bench, validate, build, triton, serve, inspect, demo):
    app.command()(verb)


def run() -> None:
    """Entry point of the console script."""
    app()
