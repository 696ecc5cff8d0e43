"""The loaded tiers of a bundle: engines, KV slots, drafter and costs, over which sequences are decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from via_sd.contract.generation_options import GenerationConfig
from via_sd.contract.graphs import DRAFTER, FULL
from via_sd.runtime.decoding.block_length import AdaptiveGamma
from via_sd.runtime.decoding.cache import SequenceCache
from via_sd.runtime.decoding.cost_model import CostModel
from via_sd.runtime.decoding.drafters import Drafter
from via_sd.runtime.decoding.drafters.constrained import ConstrainedDrafter
from via_sd.runtime.decoding.drafters.factory import new_drafter
from via_sd.runtime.decoding.logits_processors import LogitsProcessor
from via_sd.runtime.decoding.random_stream import RandomStream
from via_sd.runtime.decoding.router import Router, Routing
from via_sd.runtime.decoding.run import Run, RunOptions, SequenceState
from via_sd.runtime.decoding.sampling import Processor
from via_sd.runtime.decoding.slots import SlotPool
from via_sd.runtime.decoding.statistics import Counters
from via_sd.runtime.engines.protocol import Engine
from via_sd.runtime.engines.rows import Row


@dataclass
class SequenceCaches:
    """KV of one sequence.

    Attributes:
        tokens: the sequence, which grows while it is decoded.
        reused: tokens of the prompt whose KV the verifier's buffers held already.
        verifier: shared by all its tiers.
        drafter: a model drafter's own, None for other drafters.
    """

    tokens: list[int]
    reused: int
    verifier: SequenceCache
    drafter: SequenceCache | None = None


class TieredModel:
    """Decodes any number of sequences, from any number of threads, each in a KV slot of its own.

    Args:
        verifier: the engine of full, slim and a mask drafter.
        drafter: the engine of a model drafter.
        drafting: the manifest's `drafter`.
        slim: the slim-verifier's tier; None for a bundle without one.
        max_sequences: sequences that may run at once; more wait for a slot.
        retained_slots: KV buffers kept when idle.
        slot_timeout: seconds to wait for a slot; None waits for as long as it takes.
    """

    def __init__(
        self,
        verifier: Engine,
        drafter: Engine | None,
        drafting: Mapping[str, Any],
        slim: str | None,
        costs: CostModel,
        *,
        max_sequences: int,
        retained_slots: int,
        slot_timeout: float | None,
    ) -> None:
        self.verifier, self.drafter, self.costs = verifier, drafter, costs
        self.slot_timeout = slot_timeout
        self._drafting, self._slim = drafting, slim
        self._slots = SlotPool(verifier, max_sequences, retained_slots)
        self._drafter_slots = SlotPool(drafter, max_sequences, retained_slots) if drafter else None

    @property
    def capacity(self) -> int:
        """Tokens that a sequence may have."""
        return self.verifier.max_seq_len

    @contextmanager
    def open(
        self,
        prompt: Sequence[int],
        config: GenerationConfig,
        router: Router,
        *,
        seed: int,
        stop_tokens: frozenset[int],
        on_token: Callable[[int, str, Row], bool],
        processors: Sequence[LogitsProcessor] = (),
        wait: bool = True,
    ) -> Iterator[Run]:
        """A sequence that begins with `prompt`, ready for a mode to decode it; it has a KV slot until the end.

        Args:
            config: resolved: with a mode that is not `auto`.
            router: judges slim's rows in mode `routed`.
            seed: keys the random stream.
            on_token: see `Run`.
            processors: change the logits of every tier's rows.
            wait: for a slot, as long as `slot_timeout` says; otherwise take one that is free now.

        Raises:
            BusyError: no slot came free in time.
        """
        counters = Counters(config.mode)
        with self.caches(prompt, wait=wait) as caches:
            counters.reused_prefix = caches.reused
            processor = Processor(config, processors, start=len(prompt))
            drafter = self.new_drafter(caches, processor, seed)
            if processor.is_constrained:
                drafter = ConstrainedDrafter(drafter, processor)
            yield Run(
                SequenceState(caches.tokens, min(config.max_new_tokens, self.capacity - len(prompt))),
                RunOptions(self._slim or FULL, self.costs, self.capacity, stop_tokens),
                Routing.of(config, router),
                caches.verifier,
                drafter,
                AdaptiveGamma(self.costs.full, fixed=config.gamma),
                processor,
                RandomStream(seed),
                counters,
                on_token,
            )

    @contextmanager
    def caches(self, prompt: Sequence[int], *, wait: bool = True) -> Iterator[SequenceCaches]:
        """KV of one sequence, in slots that are given back with the tokens whose KV they hold."""
        tokens = list(prompt)
        with ExitStack() as stack:
            slot, reused = stack.enter_context(self._slots.lease(prompt, self.slot_timeout if wait else 0.0))
            caches = SequenceCaches(tokens, reused, SequenceCache(slot.buffers, self.verifier, reused))
            held = [(slot, caches.verifier)]
            if self._drafter_slots is not None and self.drafter is not None:
                # Never waits: there are as many as verifier slots, and this sequence has one of those.
                slot, reused = stack.enter_context(self._drafter_slots.lease(prompt, None))
                caches.drafter = SequenceCache(slot.buffers, self.drafter, reused, DRAFTER)
                held.append((slot, caches.drafter))
            for slot, cache in held:
                slot.computed = partial(_prompt_read, cache, len(prompt))
            try:
                yield caches
            finally:
                # Between rounds, where a reader may leave, the buffers agree with the tokens. After a failure within
                # one the slot is thrown away.
                for slot, cache in held:
                    slot.tokens, slot.computed = tokens[: cache.lengths[FULL]], None

    def new_drafter(self, caches: SequenceCaches, processor: Processor, seed: int) -> Drafter:
        """The bundle's drafter for one sequence."""
        return new_drafter(self._drafting, caches.verifier, caches.drafter, processor, seed=seed, cost=self.costs.draft)


def _prompt_read(cache: SequenceCache, length: int) -> int:
    """Tokens of a prompt of `length` tokens that are cached for full; what is behind them may still be taken back."""
    return min(cache.lengths[FULL], length)
