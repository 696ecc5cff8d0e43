"""Drafters: who proposes the block that the verifiers judge (the paper's p)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from via_sd.runtime.decoding.cache import SequenceCache
from via_sd.runtime.decoding.sampling import Processor, Purpose, draw, uniform
from via_sd.runtime.engines.rows import HostRow, Row


@dataclass(frozen=True)
class Draft:
    """A proposed block.

    Attributes:
        tokens: the drafted tokens, in order.
        distributions: of each token the probabilities it was drawn from, None where it was not drawn (a point mass).
    """

    tokens: list[int] = field(default_factory=list)
    distributions: list[np.ndarray | None] = field(default_factory=list)


class Drafter(Protocol):
    """Proposes blocks for one sequence. What it adapts to is that sequence's own past, never a clock."""

    #: Relative cost of drafting one token, in plain steps of the full verifier.
    cost: float

    def propose(self, sequence: Sequence[int], limit: int) -> Draft:
        """At most `limit` tokens to follow `sequence` (which may have been rolled back since the last call)."""
        ...

    def read(self, sequence: Sequence[int]) -> Iterator[None]:
        """Read a prompt before the first proposal, yielding behind every chunk of a long one."""
        ...

    def expectation(self, sequence: Sequence[int]) -> int:
        """A class of situations that tend to be accepted alike (n-gram match length, say); small integers."""
        ...

    def truncate(self, length: int) -> None:
        """The sequence has been cut back to `length` tokens."""
        ...

    @property
    def seconds(self) -> float:
        """Time spent inside an engine."""
        ...

    @property
    def calls(self) -> int:
        """Calls of an engine."""
        ...


class NgramDrafter:
    """Prompt lookup: continues the sequence as its longest recent end was continued before.

    The index grows with the sequence and shrinks with a rollback; each token costs `longest` dictionary entries.
    """

    cost = 0.0
    seconds = 0.0
    calls = 0

    def __init__(self, longest: int = 5) -> None:
        self._longest = longest
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self._undo: list[list[tuple[tuple[int, ...], int | None]]] = []

    def propose(self, sequence: Sequence[int], limit: int) -> Draft:
        """See `Drafter.propose`; a copy that reaches the end of the sequence goes on with what it has copied."""
        self._synchronise(sequence)
        _, at = self._match()
        if at is None or limit <= 0:
            return Draft()
        known = self._tokens
        length = len(known)
        tokens = known[at : at + limit]
        while len(tokens) < limit:
            tokens.append(tokens[at + len(tokens) - length])
        return Draft(tokens, [None] * len(tokens))

    def read(self, sequence: Sequence[int]) -> Iterator[None]:
        """Nothing to yield for: an index is made in no time."""
        return iter(())

    def expectation(self, sequence: Sequence[int]) -> int:
        """Length of the match a proposal would rest on; 0 if there is none."""
        self._synchronise(sequence)
        return self._match()[0]

    def truncate(self, length: int) -> None:
        """Nothing to do: the next call sees the sequence as it is."""

    def _match(self) -> tuple[int, int | None]:
        end = len(self._tokens)
        for n in range(min(self._longest, end), 0, -1):
            at = self._after.get(tuple(self._tokens[end - n :]))
            if at is not None:
                return n, at
        return 0, None

    def _synchronise(self, sequence: Sequence[int]) -> None:
        known = self._tokens
        # Only the end can differ: a sequence is extended or rolled back, never edited.
        common = min(len(known), len(sequence))
        while common and known[common - 1] != sequence[common - 1]:
            common -= 1
        while len(known) > common:
            known.pop()
            for key, previous in reversed(self._undo.pop()):
                if previous is None:
                    del self._after[key]
                else:
                    self._after[key] = previous
        for token in sequence[common:]:
            self._append(token)

    def _append(self, token: int) -> None:
        """Add one token: from now on the n-grams that end before it have a continuation."""
        known, after = self._tokens, self._after
        end = len(known)
        changes = []
        for n in range(1, min(self._longest, end) + 1):
            key = tuple(known[end - n :])
            changes.append((key, after.get(key)))
            after[key] = end
        self._undo.append(changes)
        known.append(token)


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
        self._cache, self._tier, self._processor, self._seed = cache, tier, processor, seed
        self._vocabulary, self._width, self._threshold = vocabulary, widths[1], threshold
        self._padding = widths != (vocabulary, vocabulary)
        self._capacity = capacity
        self._draws = 0
        self.cost = cost

    @property
    def seconds(self) -> float:
        return self._cache.usage[self._tier].seconds

    @property
    def calls(self) -> int:
        return self._cache.usage[self._tier].calls

    def read(self, sequence: Sequence[int]) -> Iterator[None]:
        """See `Drafter.read`."""
        if len(sequence) <= self._capacity:
            yield from self._cache.chunks(self._tier, sequence, 1)

    def propose(self, sequence: Sequence[int], limit: int) -> Draft:
        """See `Drafter.propose`."""
        tokens: list[int] = []
        distributions: list[np.ndarray | None] = []
        context = list(sequence)
        while len(tokens) < limit and len(context) <= self._capacity:
            row = self._real(self._cache.run(self._tier, context, 1)[0])
            if tokens and 1 / row.sum_exp() < self._threshold:
                break
            if self._processor.config.greedy:
                token, probabilities = self._processor.best(row, context), None
            else:
                probabilities = self._processor.probabilities(row, context)
                # Not keyed by engine calls: how many a long prompt takes depends on the prefix that was re-used.
                self._draws += 1
                token = draw(probabilities, uniform(self._seed, self._draws, len(context), Purpose.DRAFT))
            tokens.append(token)
            distributions.append(probabilities)
            context.append(token)
        return Draft(tokens, distributions)

    def expectation(self, sequence: Sequence[int]) -> int:
        """One class, of those that begin hopeful: the model itself stops where it is unsure."""
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
