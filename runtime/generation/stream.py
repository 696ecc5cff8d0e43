"""A running generation: rounds of a mode on one side, chunks of certain text on the other."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Generator, Iterator
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from via_sd.contract.generation_options import GenerationConfig
from via_sd.contract.graphs import FULL
from via_sd.contract.mode_names import PAPER
from via_sd.errors import RequestError
from via_sd.runtime.decoding.block_length import AdaptiveGamma
from via_sd.runtime.decoding.modes import MODE_FUNCTIONS
from via_sd.runtime.decoding.router import DivergenceGuard
from via_sd.runtime.decoding.run import Run
from via_sd.runtime.decoding.sampling import Processor
from via_sd.runtime.decoding.statistics import Counters
from via_sd.runtime.engines.rows import Row
from via_sd.runtime.generation.completion import Chunk, Completion, TokenLogprobs
from via_sd.runtime.generation.text import TextStream

if TYPE_CHECKING:
    from via_sd.runtime.generation.pipeline import Pipeline, SequenceCaches


class CompletionStream(Iterator[Chunk]):
    """Iterate for chunks, one per round. Closing or dropping it gives its KV slot back.

    A KV slot is taken with the first chunk, not before. While a long prompt is read, chunks without tokens come in
    between, so that whoever iterates can cancel, or do something else before going on.
    """

    def __init__(
        self, pipeline: Pipeline, prompt: list[int], config: GenerationConfig, cancel: threading.Event
    ) -> None:
        config = pipeline.resolve(config)
        self.prompt_tokens = len(prompt)
        self.mode = config.mode
        self._ended: list[Completion] = []
        # Not a method's generator, which would hold the stream that holds it: a dropped stream has to end at once.
        self._chunks = _generate(pipeline, prompt, config, cancel, self._ended)

    def __iter__(self) -> CompletionStream:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def close(self) -> None:
        """End the generation where it is; it then has no completion."""
        self._chunks.close()

    @property
    def completion(self) -> Completion:
        """The whole generation, once the stream has ended."""
        if not self._ended:
            raise RequestError("the stream has not ended; iterate it to its end first")
        return self._ended[0]


def _generate(
    pipeline: Pipeline, prompt: list[int], config: GenerationConfig, cancel: threading.Event, ended: list[Completion]
) -> Generator[Chunk, None, None]:
    """Chunks of one generation, which is put into `ended` behind the last."""
    counters = Counters(config.mode)
    seed = secrets.randbits(63) if config.seed is None else config.seed
    output = _Output(pipeline, config)
    with pipeline.caches(prompt) as caches:
        counters.reused_prefix = caches.reused
        run = _new_run(pipeline, caches, prompt, config, seed, output, counters)
        rounds = MODE_FUNCTIONS[config.mode](run)
        for _ in rounds:
            if counters.rounds <= 1:
                counters.seconds["prefill"] = caches.verifier.usage[FULL].seconds
            if not run.done and cancel.is_set():
                output.reason = "cancelled"
            elif run.done and output.reason is None:
                output.reason = "length"
            if output.reason is not None:
                _account(counters, run, caches)
            # Between rounds the buffers agree with the tokens, so they are worth keeping if nobody comes back.
            caches.tokens = run.tokens
            chunk, left = output.chunk(), perf_counter()
            yield chunk
            counters.pause(perf_counter() - left)
            caches.tokens = []
            if output.reason == "cancelled":
                break
        rounds.close()
        caches.tokens = run.tokens
    ended.append(output.completion(len(prompt), counters, seed))


class _Output:
    """Takes emitted tokens, decides where the text ends, hands out what is certain."""

    def __init__(self, pipeline: Pipeline, config: GenerationConfig) -> None:
        self.reason: str | None = None
        self._eos = frozenset() if config.ignore_eos else pipeline.eos_token_ids
        self._text = TextStream(pipeline.decoder, config.stop or ())
        self._logprobs: list[TokenLogprobs] | None = None if config.logprobs is None else []
        self._alternatives = config.logprobs or 0
        self._token_ids: list[int] = []
        self._tiers: list[str] = []
        self._handed_out = 0

    @property
    def stop_tokens(self) -> frozenset[int]:
        return self._eos

    def emit(self, token: int, tier: str, row: Row) -> bool:
        """See `Run.emit`."""
        self._token_ids.append(token)
        self._tiers.append(tier)
        if self._logprobs is not None:
            self._logprobs.append(_logprobs(row, token, self._alternatives))
        if token in self._eos or not self._text.push(token):
            self.reason = "stop"
            return False
        return True

    def chunk(self) -> Chunk:
        """What came since the last one."""
        start, self._handed_out = self._handed_out, len(self._token_ids)
        text = self._text.take() if self.reason is None else self._text.finish()
        if self.reason == "length" and self._text.stopped:  # the last token completed a stop string, and more
            self.reason = "stop"
        return Chunk(text, self._token_ids[start:], self._tiers[start:], self.reason)

    def completion(self, prompt_tokens: int, counters: Counters, seed: int) -> Completion:
        """Everything; needs an end."""
        assert self.reason is not None
        return Completion(
            text=self._text.text,
            token_ids=self._token_ids,
            tiers=self._tiers,
            finish_reason=self.reason,
            prompt_tokens=prompt_tokens,
            stats=counters.statistics(),
            seed=seed,
            logprobs=self._logprobs,
            margins=counters.margins,
        )


def _new_run(
    pipeline: Pipeline,
    caches: SequenceCaches,
    prompt: list[int],
    config: GenerationConfig,
    seed: int,
    output: _Output,
    counters: Counters,
) -> Run:
    processor = Processor(config)
    return Run(
        tokens=list(prompt),
        cache=caches.verifier,
        drafter=pipeline.new_drafter(caches, processor, seed),
        gamma=AdaptiveGamma(pipeline.step_cost, fixed=config.gamma),
        processor=processor,
        seed=seed,
        emit=output.emit,
        counters=counters,
        remaining=min(config.max_new_tokens, pipeline.capacity - len(prompt)),
        capacity=pipeline.capacity,
        costs=pipeline.step_cost,
        slim_cost=pipeline.slim_cost,
        slim_always_first=config.router == PAPER,
        stop_tokens=output.stop_tokens,
        slim=pipeline.bundle.slim or FULL,
        router=pipeline.router(config),
        guard=DivergenceGuard(config.max_divergence),
        max_lag=config.max_lag,
        audit_tail=config.audit_tail,
        keep_margins=config.keep_margins,
    )


def _account(counters: Counters, run: Run, caches: SequenceCaches) -> None:
    """Read the meters once, when the text is complete."""
    full = caches.verifier.usage[FULL]
    counters.full_calls, counters.full_tokens = full.calls, full.tokens
    counters.seconds["full"] = full.seconds - counters.seconds["prefill"]
    if run.slim != FULL:
        slim = caches.verifier.usage[run.slim]
        counters.slim_calls, counters.seconds["slim"] = slim.calls, slim.seconds
    counters.draft_calls, counters.seconds["draft"] = run.drafter.calls, run.drafter.seconds
    counters.stop()


def _logprobs(row: Row, token: int, alternatives: int) -> TokenLogprobs:
    normaliser = math.log(row.sum_exp())
    top: list[tuple[int, float]] = []
    if alternatives:
        logits = row.logits
        best = np.argpartition(-logits, min(alternatives, len(logits) - 1))[:alternatives]
        top = [(int(i), row.gap(i) - normaliser) for i in best[np.argsort(-logits[best])]]
    return TokenLogprobs(row.gap(token) - normaliser, top)
