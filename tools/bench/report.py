"""What a bench found: a table for the terminal, and a page that says where it was measured."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from via_sd.files import write_whole

_WIDTH = 150


def comparison(figures: Mapping[str, Mapping[str, Any]], approximate: Collection[str] = ("routed",)) -> Table:
    """Settings by speed, overall and per bucket, with what decided it; `approximate` are those that are not exact."""
    buckets = [b for b in next(iter(figures.values())) if b != "all"]
    table = Table(title="tokens per second (over plain)", title_justify="left")
    for name in ("mode", "output", *buckets, "all", "rejected", "full calls/token", "divergence", "same as plain"):
        table.add_column(name, justify="left" if name in ("mode", "output") else "right")
    for mode, by_bucket in figures.items():
        every = by_bucket["all"]
        table.add_row(
            mode,
            "approximate" if mode in approximate else "exact",
            *(_speed(by_bucket[b]) for b in [*buckets, "all"]),
            _percent(every["rejection_rate"]),
            f"{every['full_calls_per_token']:.2f}",
            _percent(every["divergence"]),
            _percent(every["equal_to_plain"]),
        )
    return table


def write_report(path: Path, title: str, facts: Mapping[str, object], *tables: RenderableType) -> None:
    """Write `title`, `facts` and `tables` to `path` as HTML; the file appears complete or not at all."""
    console = Console(record=True, file=io.StringIO(), width=_WIDTH)
    console.print(Text(title, "bold"))
    listed = Table(show_header=False, box=None)
    for name, value in facts.items():
        listed.add_row(name, str(value))
    for renderable in (listed, *tables):
        console.print()
        console.print(renderable)
    write_whole(path, console.export_html(inline_styles=True))


def _speed(figures: dict[str, Any]) -> str:
    return f"{figures['tokens_per_s']['median']:.0f} ({figures['over_plain']['median']:.2f}x)"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
