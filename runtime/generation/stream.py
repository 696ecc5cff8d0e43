"""A running generation: rounds of a mode on one side, chunks of certain text on the other."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Generator, Iterator, Sequence
from time import perf_counter

from via_sd.contract.generation_options import GenerationConfig
from via_sd.errors import RequestError
from via_sd.runtime.decoding.modes import MODE_FUNCTIONS
from via_sd.runtime.decoding.router import Router
from via_sd.runtime.decoding.tiered_model import TieredModel
from via_sd.runtime.generation.completion import Chunk, Completion
from via_sd.runtime.generation.output import Output


class CompletionStream(Iterator[Chunk]):
    """Iterate for chunks, one per round. Closing or dropping it gives its KV slot back.

    A KV slot is taken with the first chunk, not before. While a long prompt is read, chunks without tokens come in
    between, so that whoever iterates can cancel, or do something else before going on.

    Args:
        model: decodes.
        prompt: token ids.
        config: resolved: what is asked for, with a mode that is not `auto`.
        router: for mode `routed`.
        output: takes the tokens.
        cancel: set from any thread to end after the round that is running.
    """

    def __init__(
        self,
        model: TieredModel,
        prompt: Sequence[int],
        config: GenerationConfig,
        router: Router,
        output: Output,
        cancel: threading.Event,
    ) -> None:
        self.prompt_tokens = len(prompt)
        self.mode = config.mode
        self._ended: list[Completion] = []
        # Not a method's generator, which would hold the stream that holds it: a dropped stream has to end at once.
        self._chunks = _generate(model, prompt, config, router, output, cancel, self._ended)

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
    model: TieredModel,
    prompt: Sequence[int],
    config: GenerationConfig,
    router: Router,
    output: Output,
    cancel: threading.Event,
    ended: list[Completion],
) -> Generator[Chunk, None, None]:
    """Chunks of one generation, which is put into `ended` behind the last."""
    seed = secrets.randbits(63) if config.seed is None else config.seed
    sequence = model.open(prompt, config, router, seed=seed, stop_tokens=output.stop_tokens, on_token=output.take)
    with sequence as run:
        rounds = MODE_FUNCTIONS[config.mode](run)
        for _ in rounds:
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
        rounds.close()
    ended.append(output.completion(prompt, run.counters, seed))
