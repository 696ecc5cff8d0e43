"""What a bench found, as tables for people."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

Figures = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class TextTable:
    """A table of texts, for a terminal or a page.

    Attributes:
        left: columns that are words, which stand to the left; figures stand to the right.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[str] = ()
    note: str = ""

    def __rich__(self) -> Table:
        table = Table(title=self.title, title_justify="left", caption=self.note or None, caption_justify="left")
        for name in self.head:
            table.add_column(name, justify="left" if name in self.left else "right")
        for row in self.rows:
            table.add_row(*row)
        return table


def comparison(figures: Figures, approximate: Collection[str] = ("routed",)) -> TextTable:
    """Settings by speed, overall and per bucket, with what decided it; `approximate` are those that are not exact."""
    buckets = [*(b for b in next(iter(figures.values())) if b != "all"), "all"]
    rows = []
    for mode, by_bucket in figures.items():
        every = by_bucket["all"]
        rows.append(
            (
                mode,
                "approximate" if mode in approximate else "exact",
                *(
                    _speed(by_bucket[b]["tokens_per_s"]["median"], by_bucket[b]["over_plain"]["median"])
                    for b in buckets
                ),
                _percent(every["rejection_rate"]),
                f"{every['full_calls_per_token']:.2f}",
                _percent(every["divergence"]),
                _percent(every["equal_to_plain"]),
            )
        )
    head = ("mode", "output", *buckets, "rejected", "full calls/token", "divergence", "same as plain")
    return TextTable("tokens per second (over plain)", head, rows, left=("mode", "output"))


def prediction(predicted: Figures, figures: Figures) -> TextTable:
    """Predicted speed by setting beside the measured one; a setting that was not run has only the first."""
    rows = []
    for label, by_bucket in predicted.items():
        expected, measured, share = by_bucket["all"], "-", "-"
        if label in figures:
            found = figures[label]["all"]
            measured = _speed(found["tokens_per_s"]["median"], found["over_plain"]["median"])
            share = f"{expected['over_plain'] / found['over_plain']['median'] - 1:+.0%}"
        buckets = [_ratio(by_bucket[b]["over_plain"]) for b in by_bucket if b != "all"]
        rows.append((label, *buckets, _speed(expected["tokens_per_s"], expected["over_plain"]), measured, share))
    buckets = [b for b in next(iter(predicted.values())) if b != "all"]
    return TextTable(
        "predicted tokens per second (over plain)",
        ("mode", *buckets, "all", "measured", "off by"),
        rows,
        left=("mode",),
        note="From the latency of passes and what the tiers say along plain's texts, without the host's time. "
        "A synthetic tier agrees by chance and was not run.",
    )


def _speed(tokens_per_s: float, over_plain: float) -> str:
    return f"{tokens_per_s:.0f} ({_ratio(over_plain)})"


def _ratio(value: float) -> str:
    return f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
