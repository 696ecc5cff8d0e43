"""A running generation: rounds of a mode on one side, chunks of certain text on the other."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from time import perf_counter

from via_sd.contract.generation_options import GenerationConfig
from via_sd.errors import BusyError, RequestError
from via_sd.runtime.batching.member import Member
from via_sd.runtime.batching.shared import SharedBatch
from via_sd.runtime.decoding.logits_processors import LogitsProcessor
from via_sd.runtime.decoding.modes import MODE_FUNCTIONS
from via_sd.runtime.decoding.passes import PassRequest, PassResult
from via_sd.runtime.decoding.router import Router
from via_sd.runtime.decoding.tiered_model import TieredModel
from via_sd.runtime.generation.completion import Chunk, Completion
from via_sd.runtime.generation.output import Output


class CompletionStream(Iterator[Chunk]):
    """Iterate for chunks, one per round. Closing or dropping it gives its KV slot back.

    A KV slot is taken with the first chunk, not before. While a long prompt is read, chunks without tokens come in
    between, so that whoever iterates can cancel, or do something else before going on. Streams that several threads
    iterate share forward passes; where others run passes a stream may be decoded ahead of its reader, a few rounds.

    Args:
        model: decodes.
        batch: who shares passes.
        prompt: token ids.
        config: resolved: what is asked for, with a mode that is not `auto`.
        router: for mode `routed`.
        output: takes the tokens.
        cancel: set from any thread to end after the round that is running.
        processors: change the logits of every tier's rows.
    """

    def __init__(
        self,
        model: TieredModel,
        batch: SharedBatch,
        prompt: Sequence[int],
        config: GenerationConfig,
        router: Router,
        output: Output,
        cancel: threading.Event,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.prompt_tokens = len(prompt)
        self.mode = config.mode
        self._batch = batch
        self._closed = False
        self._member: Member | None = None
        # Not a method's generator, which would hold the stream that holds it: a dropped stream has to end at once.
        self._steps = partial(_generate, model, prompt, config, router, output, cancel, processors)

    def begin(self, *, wait: bool = True) -> bool:
        """Take a KV slot and join the batch before the first chunk is asked for; whether there was a slot.

        Args:
            wait: for a slot, as long as the pipeline waits for one.

        Raises:
            BusyError: no slot came free in time; the stream has ended.
        """
        member = Member(self._steps(wait=wait))
        member.advance()
        if isinstance(member.error, BusyError) and not wait:
            return False
        self._member = member
        if member.error is not None:
            self._closed = True
            raise member.error
        self._batch.join(member)
        return True

    def __iter__(self) -> CompletionStream:
        return self

    def __next__(self) -> Chunk:
        if self._closed:
            raise StopIteration
        if self._member is None:
            self.begin()
        assert self._member is not None
        chunk: Chunk = self._batch.take(self._member)
        return chunk

    def ready(self) -> bool:
        """Whether the next chunk, or the end, is there without a forward pass."""
        return self._member is not None and bool(self._member.messages or self._member.ended)

    def skip(self) -> bool:
        """Drop the chunks that are there; whether the stream has ended.

        Raises:
            Exception: what the generation failed with.
        """
        assert self._member is not None
        ended = self._member.ended
        self._member.messages.clear()
        if ended and self._member.error is not None:
            raise self._member.error
        return ended

    def close(self) -> None:
        """End the generation where it is; it then has no completion."""
        if not self._closed:
            self._closed = True
            if self._member is not None:
                self._batch.leave(self._member)

    def __del__(self) -> None:
        self.close()

    @property
    def completion(self) -> Completion:
        """The whole generation, once the stream has ended."""
        outcome = None if self._member is None else self._member.outcome
        if not isinstance(outcome, Completion):
            raise RequestError("the stream has not ended; iterate it to its end first")
        return outcome


def finish_all(streams: Sequence[CompletionStream]) -> list[Completion]:
    """Read `streams` to their ends, as many of them side by side as there are KV slots.

    Raises:
        Exception: what the first of them that failed failed with; the others end with it.
    """
    running: list[CompletionStream] = []
    coming = list(reversed(streams))
    try:
        while running or coming:
            while coming and coming[-1].begin(wait=not running):
                running.append(coming.pop())
            next(running[0], None)  # runs the passes of all
            running = [stream for stream in running if not stream.skip()]
    finally:
        for stream in streams:
            stream.close()
    return [stream.completion for stream in streams]


def _generate(
    model: TieredModel,
    prompt: Sequence[int],
    config: GenerationConfig,
    router: Router,
    output: Output,
    cancel: threading.Event,
    processors: Sequence[LogitsProcessor],
    *,
    wait: bool,
) -> Generator[PassRequest | Chunk, PassResult | None, Completion]:
    """Passes and chunks of one generation."""
    seed = secrets.randbits(63) if config.seed is None else config.seed
    sequence = model.open(
        prompt,
        config,
        router,
        seed=seed,
        stop_tokens=output.stop_tokens,
        on_token=output.take,
        processors=processors,
        wait=wait,
    )
    with sequence as run:
        rounds = MODE_FUNCTIONS[config.mode](run)
        result: PassResult | None = None
        partly = False
        while True:
            try:
                request = rounds.send(result)
            except StopIteration:
                break
            result = None
            if request is None or partly:
                # A round is over, or a part of a long prompt is read.
                if not run.state.done and cancel.is_set():
                    output.reason = "cancelled"
                elif run.state.done and output.reason is None:
                    output.reason = "length"
                if output.reason is not None:
                    run.stop_clock()
                chunk, left = output.chunk(), perf_counter()
                yield chunk
                run.counters.pause(perf_counter() - left)
                if output.reason == "cancelled":
                    break
            partly = False
            if request is not None:
                result = yield request
                assert result is not None
                partly = result.fed < len(request.block.tokens)
                run.counters.pause(result.paused)
                run.counters.seconds["wait"] += result.waited
        rounds.close()
    return output.completion(run.counters, seed)
