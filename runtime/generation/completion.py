"""What a generation returns: chunks while it runs, a completion at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from via_sd.runtime.decoding.statistics import JudgedMargin, Statistics


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities (temperature 1, before truncation) by the tier that judged the token.

    Attributes:
        logprob: of the emitted token.
        top: the likeliest tokens with theirs, likeliest first.
    """

    logprob: float
    top: list[tuple[int, float]]


#: Text, and the tier that its tokens came from.
Piece = tuple[str, str]


@dataclass(frozen=True)
class Chunk:
    """What one round added: certain text, and the tokens emitted in it (their text may still be held back).

    Attributes:
        pieces: the text in parts, each with the tier that its tokens came from (`draft`, `slim`, `full`; `prompt` for
            what `echo` puts in front).
    """

    text: str
    token_ids: list[int]
    tiers: list[str]
    finish_reason: str | None = None
    pieces: list[Piece] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Completion:
    """A finished generation; `to_json` is what `generate --json` prints.

    Attributes:
        text: everything emitted, without special tokens, ending before a stop string.
        token_ids, tiers: per emitted token its id and tier (`draft`, `slim`, `full`); an end-of-sequence token counts.
        finish_reason: `stop` (end-of-sequence token or stop string), `length`, or `cancelled`.
        prompt_tokens: length of the prompt in tokens.
        stats: counts and times, see docs/statistics.md.
        seed: the random stream's key; the same seed gives the same output.
        logprobs: per emitted token, if asked for.
        pieces: the text in parts by tier, see `Chunk`.
        margins: with `keep_margins`, every token that `routed` asked slim for and full then judged.
    """

    text: str
    token_ids: list[int]
    tiers: list[str]
    finish_reason: str
    prompt_tokens: int
    stats: Statistics
    seed: int
    logprobs: list[TokenLogprobs] | None = field(default=None)
    margins: list[JudgedMargin] = field(default_factory=list, repr=False)
    pieces: list[Piece] = field(default_factory=list, repr=False)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "tiers": self.tiers,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "seed": self.seed,
            "stats": self.stats.to_json(),
        }
        if self.logprobs is not None:
            data["logprobs"] = [{"logprob": t.logprob, "top": [list(pair) for pair in t.top]} for t in self.logprobs]
        return data
