"""`via-sd-export serve`: starts Triton Inference Server over a model repository, where it is installed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from via_sd.tools.commands.console import CommandError, command, err

#: Where NVIDIA's images have it, also where it is not on the PATH.
INSTALLED = Path("/opt/tritonserver/bin/tritonserver")
_REPOSITORY = "--model-repository"


@command
def serve(
    repository: Annotated[Path, typer.Argument(help="Model repository, as `triton` writes it.")],
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[-- FLAGS]", help="Flags for tritonserver, behind `--`.")
    ] = None,
    server: Annotated[
        Path | None, typer.Option(help="The tritonserver program.", show_default="the one on the PATH")
    ] = None,
) -> None:
    """Start Triton Inference Server over REPOSITORY."""
    given = flags or []
    if any(flag.split("=")[0] in (_REPOSITORY, "--model-store") for flag in given):
        raise CommandError(f"{_REPOSITORY} is given already by REPOSITORY; leave it out")
    models = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
    if not models:
        raise CommandError(f"{repository} is no model repository: write one with via-sd-export triton BUNDLE")
    program = _program(server)
    line = [str(program), f"{_REPOSITORY}={repository.resolve()}", *given]
    err.print(f"serving {', '.join(models)}: {' '.join(line)}", highlight=False, soft_wrap=True)
    # It takes this process's place: signals reach it, and what it prints and how it ends are its own.
    os.execve(program, line, _environment())


def _program(given: Path | None) -> Path:
    for candidate in (given,) if given is not None else (shutil.which("tritonserver"), INSTALLED):
        if candidate is not None and os.access(candidate, os.X_OK) and Path(candidate).is_file():
            return Path(candidate).resolve()
    if given is not None:
        raise CommandError(f"{given} is no program; --server wants the path of tritonserver")
    raise CommandError(
        f"tritonserver is neither on the PATH nor at {INSTALLED}; run this in NVIDIA's image "
        "(nvcr.io/nvidia/tritonserver) with via-sd-export installed there, or name the program with --server"
    )


def _environment() -> dict[str, str]:
    """What the server runs in: its Python backend takes the first `python3` on the PATH, which has to be this one."""
    environment, here = dict(os.environ), Path(sys.executable).parent
    found = shutil.which("python3")
    if found is None or Path(found).parent != here:
        environment["PATH"] = os.pathsep.join(filter(None, [str(here), environment.get("PATH", "")]))
    return environment
