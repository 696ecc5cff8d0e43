"""What a generation counted and measured (docs/statistics.md): counters while it runs, statistics at its end."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

#: Where an emitted token's authority comes from: the drafter, the slim-verifier, the full verifier.
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


@dataclass(frozen=True)
class Divergence:
    """How far `routed` is from the full verifier, over the tokens that the slim-verifier accepted alone.

    Attributes:
        checked: number of these tokens that the full verifier has judged since.
        disagreed: sum over them of the disagreement, 0 to 1 each: greedy, 1 where the full verifier's token differs;
            sampling, one minus the overlap of the two distributions.
        rate: disagreed / checked; None if nothing was checked.
    """

    checked: int
    disagreed: float
    rate: float | None


@dataclass(frozen=True)
class Times:
    """Where the time went, in milliseconds.

    Attributes:
        prefill: forward passes of the full verifier over the prompt.
        draft, slim, full: forward passes of each tier after that.
        wait: passes of other sequences, which this one did not share.
        host: everything outside the engines.
        total: all of it, without what the reader of a stream took between chunks.
    """

    prefill: float
    draft: float
    slim: float
    full: float
    wait: float
    host: float
    total: float


@dataclass(frozen=True)
class Statistics:
    """What a finished generation counted and measured.

    `evaluated_tokens` and `accepted_tokens` stop at the token that ended the text.

    Attributes:
        mode: the decoding mode that ran; `auto` is resolved.
        emitted_tokens: tokens of the answer.
        rounds: rounds of the mode; the first one emits the token that follows the prompt.
        drafted_tokens: tokens that the drafter proposed.
        evaluated_tokens: drafted tokens that a verifier judged.
        accepted_tokens: those of them that were kept.
        rejection_rate: 1 - accepted / evaluated, judged by the tier that decided; None if nothing was evaluated.
        mean_accepted_length: accepted tokens per round with a draft; None without such a round.
        accepted_by_position: per position in a drafted block, the share that was accepted of those judged there.
        tier_counts: emitted tokens by the tier they came from, see `TOKEN_TIERS`.
        escalations: times the router went to the full verifier.
        escalation_rate: escalations per emitted token.
        draft_calls, slim_calls, full_calls: forward passes of each tier, the prompt's included.
        full_tokens: positions fed to the full verifier.
        reused_prefix_tokens: tokens of the prompt whose KV was cached by an earlier request.
        checked_by_full: share of the emitted tokens that the full verifier has judged; None if none was emitted.
        divergence: of `routed`; see `Divergence`.
        time_ms: see `Times`.
        ttft_ms: milliseconds to the first token.
        tokens_per_s: (emitted - 1) per second after the first token; None for fewer than two tokens.
    """

    mode: str
    emitted_tokens: int
    rounds: int
    drafted_tokens: int
    evaluated_tokens: int
    accepted_tokens: int
    rejection_rate: float | None
    mean_accepted_length: float | None
    accepted_by_position: list[float]
    tier_counts: dict[str, int]
    escalations: int
    escalation_rate: float
    draft_calls: int
    slim_calls: int
    full_calls: int
    full_tokens: int
    reused_prefix_tokens: int
    checked_by_full: float | None
    divergence: Divergence
    time_ms: Times
    ttft_ms: float
    tokens_per_s: float | None

    def to_json(self) -> dict[str, Any]:
        """The `stats` object of `generate --json`: the fields by name."""
        return asdict(self)


@dataclass
class Counters:
    """Counts and times of a running generation, times in seconds; see `Statistics` for what each becomes."""

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
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("prefill", "draft", "slim", "full", "wait"), 0.0)
    )
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
        """Leave out time that just went by: the reader of the text had the thread."""
        if self.ended is None:
            self.started += seconds
            if self.first_token_at is not None:
                self.first_token_at += seconds

    def stop(self) -> None:
        """Stop the clock: the text is complete."""
        self.ended = perf_counter()

    @property
    def emitted_tokens(self) -> int:
        return sum(self.tier_counts.values())

    def statistics(self) -> Statistics:
        """The result."""
        emitted = self.emitted_tokens
        ended = self.ended if self.ended is not None else perf_counter()
        total = ended - self.started
        ttft = (self.first_token_at or ended) - self.started
        decode = total - ttft
        in_engine = {name: 1e3 * value for name, value in self.seconds.items()}
        host = 1e3 * max(0.0, total - sum(self.seconds.values()))
        rate = self.disagreement / self.audited if self.audited else None
        return Statistics(
            mode=self.mode,
            emitted_tokens=emitted,
            rounds=self.rounds,
            drafted_tokens=self.drafted,
            evaluated_tokens=self.evaluated,
            accepted_tokens=self.accepted,
            rejection_rate=1 - self.accepted / self.evaluated if self.evaluated else None,
            mean_accepted_length=self.accepted / self.draft_rounds if self.draft_rounds else None,
            accepted_by_position=[k / n for k, n in zip(self.kept_at, self.judged_at, strict=True)],
            tier_counts=dict(self.tier_counts),
            escalations=self.escalations,
            escalation_rate=self.escalations / emitted if emitted else 0.0,
            draft_calls=self.draft_calls,
            slim_calls=self.slim_calls,
            full_calls=self.full_calls,
            full_tokens=self.full_tokens,
            reused_prefix_tokens=self.reused_prefix,
            checked_by_full=self.checked / emitted if emitted else None,
            divergence=Divergence(self.audited, self.disagreement, rate),
            time_ms=Times(**in_engine, host=host, total=1e3 * total),
            ttft_ms=1e3 * ttft,
            tokens_per_s=(emitted - 1) / decode if emitted > 1 and decode > 0 else None,
        )
