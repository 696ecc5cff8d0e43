"""A table on the terminal as a page that says where it was measured, and can be sent to somebody."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table

from via_sd.masks.files import write_whole

_WIDTH = 150


def write_report(path: Path, title: str, facts: Mapping[str, object], *tables: RenderableType) -> None:
    """Write `title`, `facts` and `tables` to `path` as HTML; the file appears complete or not at all."""
    console = Console(record=True, file=io.StringIO(), width=_WIDTH)
    console.print(f"[bold]{title}[/]")
    listed = Table(show_header=False, box=None)
    for name, value in facts.items():
        listed.add_row(name, str(value))
    for renderable in (listed, *tables):
        console.print()
        console.print(renderable)
    write_whole(path, console.export_html(inline_styles=True))
