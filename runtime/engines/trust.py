"""Which plans were built here: a plan is code that will run, and a hash inside a bundle shows damage, not trust."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def record_file() -> Path:
    """The user's own list of the plans built on this machine, one sha256 a line."""
    root = os.environ.get("XDG_STATE_HOME")
    return (Path(root) if root else Path.home() / ".local" / "state") / "via-sd-export" / "built-engines"


def record_built(digests: Iterable[str]) -> None:
    """Add the sha256 of plans that were built here; raises OSError where the list cannot be written."""
    new = sorted(set(digests) - built_here())
    if not new:
        return
    file = record_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="ascii") as stream:
        stream.writelines(f"{digest}\n" for digest in new)


def built_here() -> set[str]:
    """sha256 of every plan on the list; empty if there is none."""
    try:
        return set(record_file().read_text(encoding="ascii", errors="replace").split())
    except OSError:
        return set()
