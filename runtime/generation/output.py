"""From emitted tokens to a completion: the text so far, where it ends, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from via_sd.contract.generation_options import GenerationConfig
from via_sd.runtime.decoding.statistics import Counters
from via_sd.runtime.engines.rows import Row
from via_sd.runtime.generation.completion import Chunk, Completion, TokenLogprobs
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

    def take(self, token: int, tier: str, row: Row) -> bool:
        """Take one token; False if it completes the text. See `Run.on_token`."""
        self._token_ids.append(token)
        self._tiers.append(tier)
        if self._logprobs is not None:
            self._logprobs.append(_logprobs(row, token, self._alternatives))
        searching = len(self._token_ids) > self._unstoppable
        # An end-of-sequence token is no text, unless special tokens are; a request's own stop token is.
        more = token in self._silent or self._text.push(token, searching=searching)
        if token in self.stop_tokens or not more:
            self.reason = "stop"
            return False
        return True

    def chunk(self) -> Chunk:
        """What came since the last one."""
        start, self._handed_out = self._handed_out, len(self._token_ids)
        text = self._text.take() if self.reason is None else self._text.finish()
        text, self._echo = self._echo + text, ""
        if self.reason == "length" and self._text.stopped:  # the last token completed a stop string, and more
            self.reason = "stop"
        return Chunk(text, self._token_ids[start:], self._tiers[start:], self.reason)

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
        )


def _logprobs(row: Row, token: int, alternatives: int) -> TokenLogprobs:
    normaliser = math.log(row.sum_exp())
    top: list[tuple[int, float]] = []
    if alternatives:
        logits = row.logits
        best = np.argpartition(-logits, min(alternatives, len(logits) - 1))[:alternatives]
        top = [(int(i), row.gap(i) - normaliser) for i in best[np.argsort(-logits[best])]]
    return TokenLogprobs(row.gap(token) - normaliser, top)
