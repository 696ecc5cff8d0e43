"""Failures of the libraries that read models: whatever they raise becomes one error of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from via_sd.errors import ExportError, ViaSdError

#: Longest part of a foreign message that is passed on.
_LONGEST = 400


@contextlib.contextmanager
def one_message(doing: str, kind: type[ExportError] = ExportError, advice: str = "") -> Iterator[None]:
    """Turn an exception of a library in the block into one of `kind`: what was being done, its type, its message.

    A library written in Rust panics with an exception that is no `Exception`. Our own errors, a missing package, a file
    system that is full and an interruption pass unchanged.
    """
    try:
        yield
    except (ViaSdError, ModuleNotFoundError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise kind(f"{doing}: {describe(error)}{f'; {advice}' if advice else ''}") from error


def describe(error: BaseException) -> str:
    """Type and message of a foreign exception, in one line."""
    text = " ".join(str(error).split())
    if len(text) > _LONGEST:
        text = text[:_LONGEST] + " ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
