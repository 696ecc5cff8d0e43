"""What every command does at the terminal: progress on stderr, results on stdout, one clear message when it fails."""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TextIO, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from via_sd.errors import ExportError
from via_sd.masks import MaskError
from via_sd.progress import Progress
from via_sd.runtime import ViaSdError

P = ParamSpec("P")
R = TypeVar("R")

#: Exit codes: 1 a check failed, 2 bad usage or input.
CHECK_FAILED, BAD_INPUT = 1, 2
_INTERRUPTED = 130
#: Where our code lies: in a checkout the folder that holds `tools/` and the others.
_PACKAGE = Path(__file__).resolve().parents[2]

# Where nobody knows the width (a pipe, a file), tables are as wide as they need to be rather than cut at 80.
out = Console(width=None if sys.stdout.isatty() else 160)
err = Console(stderr=True)


class CommandError(Exception):
    """An expected failure of a command: bad input that no library error names."""


class CheckFailedError(Exception):
    """A comparison that a command was asked to make came out wrong."""


#: What is imported only where it is needed -> the extra that brings it.
EXTRAS = {
    **dict.fromkeys(("onnx_ir", "onnx", "mobius", "torch", "transformers", "safetensors", "gguf"), "export"),
    **dict.fromkeys(("optuna", "matplotlib"), "search"),
    "polygraphy": "polygraphy",
    "onnxruntime": "cpu",
}

#: Errors that mean bad input.
EXPECTED_FAILURES = (ViaSdError, MaskError, ExportError, CommandError)


def command(function: Callable[P, R]) -> Callable[P, R]:
    """Turn expected failures into one message on stderr and an exit code."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with _warnings_in_a_line():
                return function(*args, **kwargs)
        except CheckFailedError as error:
            raise _failed(str(error), CHECK_FAILED) from None
        except EXPECTED_FAILURES as error:
            raise _failed(str(error), BAD_INPUT) from None
        except ModuleNotFoundError as error:
            extra = EXTRAS.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            message = f"this needs {error.name}, which is not installed: pip install 'via-sd-export[{extra}]'"
            raise _failed(message, BAD_INPUT) from None
        except BrokenPipeError:  # the reader of our output has seen enough
            raise
        except OSError as error:  # a folder that cannot be written, a full disk
            raise _failed(str(error), BAD_INPUT) from None
        except KeyboardInterrupt:
            raise _failed("interrupted", _INTERRUPTED) from None

    return wrapped


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Show what our own code warns of as one line on stderr, without the place in the code."""
    with warnings.catch_warnings():
        elsewhere = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if category is UserWarning and _PACKAGE in Path(filename).resolve().parents:
                text = escape(" ".join(str(message).split()))
                err.print(f"[bold yellow]warning:[/] {text}", soft_wrap=True, highlight=False)
            else:
                elsewhere(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def check_writable(*files: Path | None) -> None:
    """Raise `CommandError` for a file that could not be written when the long work is done."""
    for file in filter(None, files):
        if file.is_dir():
            raise CommandError(f"{file} is a directory; name a file in it")
        if not file.parent.is_dir():
            raise CommandError(f"cannot write {file}: there is no directory {file.parent}; make it first")
        if not os.access(file.parent, os.W_OK):
            raise CommandError(f"cannot write {file}: {file.parent} is not writable; choose another place")


def _failed(message: str, code: int) -> typer.Exit:
    """Print one message; the exception that ends the process with `code`."""
    err.print(f"[bold red]error:[/] {escape(' '.join(message.split()))}", soft_wrap=True, highlight=False)
    return typer.Exit(code)


def print_json(facts: Any, *, ensure_ascii: bool = True) -> None:
    """Print exactly one JSON object."""
    json.dump(facts, sys.stdout, ensure_ascii=ensure_ascii)
    sys.stdout.write("\n")


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr, if it is a terminal; call it with a description and the share done, 0 to 1 or None."""
    with ProgressBar(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as progress:
        task = progress.add_task("starting", total=None)

        def update(description: str, share: float | None) -> None:
            new = description != progress.tasks[task].description  # shown at once: the next step may hide stderr
            total = None if share is None else 1.0
            progress.update(task, description=description, total=total, completed=share or 0.0, refresh=new)

        yield update
