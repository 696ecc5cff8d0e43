"""How work that takes long reports how far it is."""

from __future__ import annotations

from collections.abc import Callable

#: Called with what is being done, and the share of it that is done: 0 to 1, or None where that is unknown.
Progress = Callable[[str, float | None], None]


def no_progress(what: str, share: float | None) -> None:
    """Report nothing."""


def prefixed(progress: Progress, prefix: str) -> Progress:
    """`progress`, told of everything with `prefix` and a colon before it."""
    return lambda what, share: progress(f"{prefix}: {what}", share)
