"""A drafter that is a language model: one of its own, or a deeper mask of the verifier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from via_sd.runtime.decoding.cache import SequenceCache
from via_sd.runtime.decoding.drafters.protocol import Draft
from via_sd.runtime.decoding.passes import Passes
from via_sd.runtime.decoding.random_stream import Purpose, RandomStream
from via_sd.runtime.decoding.sampling import Processor, draw
from via_sd.runtime.engines.rows import HostRow, Row


class ModelDrafter:
    """Drafts with a language model: one of its own (with a cache of its own), or a deeper mask of the verifier itself.

    Drafting stops early where the model is unsure. That is decided from the probabilities of the next token before
    it is drawn, so the distribution of drafted tokens stays as declared.

    Args:
        cache: KV the drafter runs on; the verifier's own for a mask.
        tier: the tier of the cache that drafts.
        seed: keys the random stream.
        vocabulary: number of real tokens; logits beyond are padding, cut off or filled up to the verifier's width.
        widths: logits per row of the drafter, and of the verifier.
        capacity: tokens the drafter's KV buffers hold; where the sequence is longer, it proposes nothing.
        cost: of one drafted token, in plain steps of the verifier.
        threshold: drafting stops before a token whose likeliest candidate has less probability than this.
    """

    def __init__(
        self,
        cache: SequenceCache,
        tier: str,
        processor: Processor,
        seed: int,
        *,
        vocabulary: int,
        widths: tuple[int, int],
        capacity: int,
        cost: float,
        threshold: float = 0.4,
    ) -> None:
        self._cache, self._tier, self._processor = cache, tier, processor
        self._random = RandomStream(seed)
        self._vocabulary, self._width, self._threshold = vocabulary, widths[1], threshold
        self._padding = widths != (vocabulary, vocabulary)
        self._capacity = capacity
        self.cost = cost

    @property
    def seconds(self) -> float:
        return self._cache.usage[self._tier].seconds

    @property
    def calls(self) -> int:
        return self._cache.usage[self._tier].calls

    def propose(self, sequence: Sequence[int], limit: int) -> Passes[Draft]:
        """See `Drafter.propose`."""
        tokens: list[int] = []
        distributions: list[np.ndarray | None] = []
        context = list(sequence)
        while len(tokens) < limit and len(context) <= self._capacity:
            (row,) = yield from self._cache.forward(self._tier, context, 1)
            row = self._real(row)
            if tokens and 1 / row.sum_exp() < self._threshold:
                break
            if self._processor.greedy:
                token, probabilities = self._processor.best(row, context), None
            else:
                probabilities = self._processor.probabilities(row, context)
                # Not keyed by engine calls: how many a long prompt takes depends on the prefix that was re-used.
                self._random.attempt += 1
                token = draw(probabilities, self._random.uniform(len(context), Purpose.DRAFT))
            tokens.append(token)
            distributions.append(probabilities)
            context.append(token)
        return Draft(tokens, distributions)

    def expectation(self, sequence: Sequence[int]) -> int:
        """One class, with a prior of frequent acceptance: the model itself stops where it is unsure."""
        return 5

    def truncate(self, length: int) -> None:
        self._cache.truncate(length)

    def _real(self, row: Row) -> Row:
        """The row with padding masked out, as wide as the verifier's; as it is where only its best token matters."""
        if not self._padding or (self._processor.needs_only_best and row.argmax() < self._vocabulary):
            return row
        logits = np.full(self._width, -np.inf, np.float32)
        real = min(self._vocabulary, self._width, len(row.logits))
        logits[:real] = row.logits[:real]
        return HostRow(logits)
