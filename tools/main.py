"""The command line: `via-sd-export VERB …`."""

from __future__ import annotations

import typer

from via_sd.tools.commands.bench import bench
from via_sd.tools.commands.build import build
from via_sd.tools.commands.demo import demo
from via_sd.tools.commands.export import export
from via_sd.tools.commands.generate import generate
from via_sd.tools.commands.inspect import inspect
from via_sd.tools.commands.search import search
from via_sd.tools.commands.triton import triton
from via_sd.tools.commands.validate import validate

app = typer.Typer(
    name="via-sd-export",
    help="VIA-SD speculative decoding: export a verifier and its slim-verifier over one set of weights, and run them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (export, search, generate, bench, validate, build, triton, inspect, demo):
    app.command()(verb)


def run() -> None:
    """Entry point of the console script."""
    app()
