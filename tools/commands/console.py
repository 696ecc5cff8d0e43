"""What every command does at the terminal: progress on stderr, results on stdout, one clear message when it fails."""

from __future__ import annotations

import functools
import io
import json
import os
import signal
import sys
import threading
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TextIO, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.text import Text

from via_sd.errors import ExportError
from via_sd.masks import MaskError
from via_sd.progress import Progress
from via_sd.runtime import ViaSdError

P = ParamSpec("P")
R = TypeVar("R")

#: Exit codes: 1 a check failed, 2 bad usage or input.
CHECK_FAILED, BAD_INPUT = 1, 2
_INTERRUPTED = 130
_SIGNALLED = 128
#: Where our code lies: in a checkout the folder that holds `tools/` and the others.
_PACKAGE = Path(__file__).resolve().parents[2]


def is_terminal(stream: TextIO | None) -> bool:
    """Whether `stream` is a terminal; one that was closed before we began is None."""
    return stream is not None and stream.isatty()


class _Terminal(Console):
    """A console that prints text as text: names and messages are no markup, and steer no terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def printable(text: str) -> str:
    """`text` with its control characters written out, all but line feeds and tabs."""
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs") else ascii(char)[1:-1] for char in text
    )


# Where nobody knows the width (a pipe, a file), tables are as wide as they need to be rather than cut at 80.
out = _Terminal(width=None if is_terminal(sys.stdout) else 160)
err = _Terminal(stderr=True)


class CommandError(Exception):
    """An expected failure of a command: bad input that no library error names."""


class CheckFailedError(Exception):
    """A comparison that a command was asked to make came out wrong."""


class _Ended(KeyboardInterrupt):
    """A signal asked the process to end."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__()
        self.signal = number


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
            _escape_foreign_characters()
            with _warnings_in_a_line(), _ending_in_order():
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
        except MemoryError as error:
            reason = f" ({error})" if str(error) else ""
            raise _failed(f"there is not enough memory for this{reason}", BAD_INPUT) from None
        except _Ended as end:
            raise _failed(f"ended by {end.signal.name}", _SIGNALLED + end.signal) from None
        except KeyboardInterrupt:
            raise _failed("interrupted", _INTERRUPTED) from None

    return wrapped


def _escape_foreign_characters() -> None:
    """Escape the characters that the encoding of stdout or stderr does not have, rather than fail halfway."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the block as Ctrl-C does, so that nothing half done stays behind."""

    def end(number: int, _: Any) -> None:
        raise _Ended(signal.Signals(number))

    ours: list[int] = []
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            # Whoever ignores one of them (nohup), or has a handler, means it.
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, end)
                ours.append(number)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


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
                _say("warning:", "bold yellow", str(message))
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
    _say("error:", "bold red", message)
    return typer.Exit(code)


def _say(label: str, style: str, message: str) -> None:
    text = Text.assemble((label, style), f" {printable(' '.join(message.split()))}")
    err.print(text, soft_wrap=True, highlight=False)


def print_json(facts: Any, *, ensure_ascii: bool = True) -> None:
    """Print exactly one JSON object."""
    # Whole or not at all: what the terminal's encoding has no character for is escaped.
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "")
    sys.stdout.write(json.dumps(facts, ensure_ascii=ensure_ascii or encoding != "utf8") + "\n")


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr, if it is a terminal; call it with a description and the share done, 0 to 1 or None."""
    with ProgressBar(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
        disable=not is_terminal(sys.stderr),
    ) as progress:
        task = progress.add_task("starting", total=None)

        def update(description: str, share: float | None) -> None:
            new = description != progress.tasks[task].description  # shown at once: the next step may hide stderr
            total = None if share is None else 1.0
            progress.update(task, description=description, total=total, completed=share or 0.0, refresh=new)

        yield update
