"""From emitted tokens to a completion: the text so far, where it ends, and why."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from via_sd.contract.generation_options import GenerationConfig
from via_sd.runtime.decoding.statistics import Counters
from via_sd.runtime.engines.rows import Row
from via_sd.runtime.generation.completion import Chunk, Completion, Piece, TokenLogprobs
from via_sd.runtime.generation.text import Detokenizer, TextStream


class Output:
    """Takes the emitted tokens of one request, decides where the text ends, and hands out what is certain.

    Attributes:
        stop_tokens: tokens that end the text.
        reason: why the text has ended, see `Completion.finish_reason`; None while it goes on.
    """

    def __init__(
        self, detokenize: Detokenizer, eos_token_ids: frozenset[int], config: GenerationConfig, prompt: Sequence[int]
    ) -> None:
        ends = frozenset() if config.ignore_eos else eos_token_ids
        self.stop_tokens: frozenset[int] = ends | frozenset(config.stop_token_ids)
        self._silent = ends - detokenize.special.keys()
        self.reason: str | None = None
        self._text = TextStream(detokenize, config.stop or (), skip_special_tokens=config.skip_special_tokens)
        self._echo = detokenize(prompt, config.skip_special_tokens) if config.echo else ""
        self._prompt_tokens, self._echoed = len(prompt), self._echo
        self._unstoppable = config.min_new_tokens or 0
        self._logprobs: list[TokenLogprobs] | None = None if config.logprobs is None else []
        self._alternatives = config.logprobs or 0
        self._token_ids: list[int] = []
        self._tiers: list[str] = []
        self._handed_out = 0
        self._ends: list[int] = []  # where each token's text ends
        self._shown = 0  # characters handed out
        self._pieces: list[Piece] = [(self._echo, "prompt")] if self._echo else []

    def take(self, token: int, tier: str, row: Row) -> bool:
        """Take one token; False if it completes the text. See `Run.on_token`."""
        self._token_ids.append(token)
        self._tiers.append(tier)
        if self._logprobs is not None:
            self._logprobs.append(_logprobs(row, token, self._alternatives))
        searching = len(self._token_ids) > self._unstoppable
        # An end-of-sequence token is no text, unless special tokens are; a request's own stop token is.
        more = token in self._silent or self._text.push(token, searching=searching)
        self._ends.append(self._text.length)
        if token in self.stop_tokens or not more:
            self.reason = "stop"
            return False
        return True

    def chunk(self) -> Chunk:
        """What came since the last one."""
        start, self._handed_out = self._handed_out, len(self._token_ids)
        text = self._text.take() if self.reason is None else self._text.finish()
        pieces = [(self._echo, "prompt")] if self._echo else []
        pieces += self._by_tier(text)
        text, self._echo = self._echo + text, ""
        if self.reason == "length" and self._text.stopped:  # the last token completed a stop string, and more
            self.reason = "stop"
        return Chunk(text, self._token_ids[start:], self._tiers[start:], self.reason, pieces)

    def _by_tier(self, text: str) -> list[Piece]:
        """What was taken of the text now, in parts by the tier of the tokens whose text it is."""
        begin, at = self._shown, 0
        self._shown += len(text)
        found: list[Piece] = []
        while at < len(text):
            token = min(bisect_right(self._ends, begin + at), len(self._ends) - 1)
            # The last token has all that follows: bytes of an unfinished character, too.
            end = len(text) if token == len(self._ends) - 1 else min(self._ends[token] - begin, len(text))
            _append(found, text[at:end], self._tiers[token])
            at = end
        for piece in found:
            _append(self._pieces, *piece)
        return found

    def completion(self, counters: Counters, seed: int) -> Completion:
        """Everything, once there is a reason."""
        assert self.reason is not None
        return Completion(
            text=self._echoed + self._text.text,
            token_ids=self._token_ids,
            tiers=self._tiers,
            finish_reason=self.reason,
            prompt_tokens=self._prompt_tokens,
            stats=counters.statistics(),
            seed=seed,
            logprobs=self._logprobs,
            margins=counters.margins,
            pieces=self._pieces,
        )


def _append(pieces: list[Piece], text: str, tier: str) -> None:
    """Add a piece, to the last one if that is of the same tier."""
    if pieces and pieces[-1][1] == tier:
        text = pieces.pop()[0] + text
    pieces.append((text, tier))


def _logprobs(row: Row, token: int, alternatives: int) -> TokenLogprobs:
    normaliser = math.log(row.sum_exp())
    top: list[tuple[int, float]] = []
    if alternatives:
        logits = row.logits
        best = np.argpartition(-logits, min(alternatives, len(logits) - 1))[:alternatives]
        top = [(int(i), row.gap(i) - normaliser) for i in best[np.argsort(-logits[best])]]
    return TokenLogprobs(row.gap(token) - normaliser, top)
