"""Generated text at the terminal: tokens in the colour of the tier they came from, and one line about a completion."""

from __future__ import annotations

from collections.abc import Iterable

from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from via_sd.runtime import Completion
from via_sd.tools.commands.console import out, printable

#: Colour of a token by its tier.
TIER_STYLES = {"draft": "green", "slim": "yellow", "full": "default"}


def show(pieces: Iterable[tuple[str, str]]) -> None:
    """Print text in the colours of its tiers, character for character (rich's own `Text` would expand tabs)."""
    segments = [
        Segment(printable(text) if out.is_terminal else text, Style.parse(TIER_STYLES.get(tier, "default")))
        for text, tier in pieces
    ]
    out.print(Segments(segments), end="", soft_wrap=True)


def summary(completion: Completion) -> Text:
    """One line: speed, acceptance, tier shares in their colours."""
    stats = completion.stats
    emitted = stats.emitted_tokens
    parts = [f"{stats.mode}: {emitted} tokens"]
    if stats.tokens_per_s is not None:
        parts.append(f"{stats.tokens_per_s:.1f} tok/s")
    if stats.evaluated_tokens:
        parts.append(f"{stats.accepted_tokens} of {stats.evaluated_tokens} drafted tokens accepted")
    if stats.divergence.rate is not None:
        parts.append(f"divergence {stats.divergence.rate:.1%} over {stats.divergence.checked} audited tokens")
    text = Text(" | ".join(parts) + " | ", style="dim")
    for tier, count in stats.tier_counts.items():
        text.append(f"{tier} {count / emitted:.0%} ", style=TIER_STYLES[tier])
    return text.append(f"| {completion.finish_reason}", style="dim")
