"""What a generation counted and measured (docs/statistics.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

#: Where an emitted token's authority comes from.
TOKEN_TIERS = ("draft", "slim", "full")


@dataclass(frozen=True)
class JudgedMargin:
    """A token `routed` asked slim for, and what full thought there.

    Attributes:
        position: tokens of the answer before it.
        margin: slim's, see `Row.margin`.
        agreed: whether full's likeliest token was slim's too.
    """

    position: int
    margin: float
    agreed: bool


@dataclass
class Stats:
    """Counts and times of one generation; times in seconds, `to_json` gives milliseconds.

    `evaluated` counts drafted tokens some verifier judged, `accepted` those of them that were kept; both stop at the
    token that ended the text.
    """

    mode: str
    rounds: int = 0
    draft_rounds: int = 0
    drafted: int = 0
    evaluated: int = 0
    accepted: int = 0
    escalations: int = 0
    draft_calls: int = 0
    slim_calls: int = 0
    full_calls: int = 0
    full_tokens: int = 0
    checked: int = 0
    disagreement: float = 0.0
    audited: int = 0
    reused_prefix: int = 0
    margins: list[JudgedMargin] = field(default_factory=list)
    judged_at: list[int] = field(default_factory=list)
    kept_at: list[int] = field(default_factory=list)
    tier_counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOKEN_TIERS, 0))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("prefill", "draft", "slim", "full"), 0.0))
    started: float = field(default_factory=perf_counter)
    first_token_at: float | None = None
    ended: float | None = None

    def emitted(self, tier: str) -> None:
        """Count an emitted token of `tier`."""
        if self.first_token_at is None:
            self.first_token_at = perf_counter()
        self.tier_counts[tier] += 1

    def block(self, judged: int, kept: int) -> None:
        """Count a drafted block by position; unlike the other counts, beyond the token that ended the text too."""
        while len(self.judged_at) < judged:
            self.judged_at.append(0)
            self.kept_at.append(0)
        for j in range(judged):
            self.judged_at[j] += 1
            self.kept_at[j] += j < kept

    def pause(self, seconds: float) -> None:
        """Leave out time that just went by: whoever reads the text had the thread."""
        if self.ended is None:
            self.started += seconds
            if self.first_token_at is not None:
                self.first_token_at += seconds

    def finish(self) -> None:
        self.ended = perf_counter()

    @property
    def emitted_tokens(self) -> int:
        return sum(self.tier_counts.values())

    def to_json(self) -> dict[str, Any]:
        """The `stats` object of `generate --json`."""
        emitted = self.emitted_tokens
        ended = self.ended if self.ended is not None else perf_counter()
        total = ended - self.started
        ttft = (self.first_token_at or ended) - self.started
        decode = total - ttft
        engine = sum(self.seconds.values())
        return {
            "mode": self.mode,
            "emitted_tokens": emitted,
            "rounds": self.rounds,
            "drafted_tokens": self.drafted,
            "evaluated_tokens": self.evaluated,
            "accepted_tokens": self.accepted,
            "rejection_rate": 1 - self.accepted / self.evaluated if self.evaluated else None,
            "mean_accepted_length": self.accepted / self.draft_rounds if self.draft_rounds else None,
            "accepted_by_position": [k / n for k, n in zip(self.kept_at, self.judged_at, strict=True)],
            "tier_counts": dict(self.tier_counts),
            "escalations": self.escalations,
            "escalation_rate": self.escalations / emitted if emitted else 0.0,
            "draft_calls": self.draft_calls,
            "slim_calls": self.slim_calls,
            "full_calls": self.full_calls,
            "full_tokens": self.full_tokens,
            "reused_prefix_tokens": self.reused_prefix,
            "checked_by_full": self.checked / emitted if emitted else None,
            "divergence": {
                "checked": self.audited,
                "disagreed": self.disagreement,
                "rate": self.disagreement / self.audited if self.audited else None,
            },
            "time_ms": {
                **{name: 1e3 * value for name, value in self.seconds.items()},
                "host": 1e3 * max(0.0, total - engine),
                "total": 1e3 * total,
            },
            "ttft_ms": 1e3 * ttft,
            "tokens_per_s": (emitted - 1) / decode if emitted > 1 and decode > 0 else None,
        }
