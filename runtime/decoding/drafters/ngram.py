"""Prompt lookup: a drafter without a model."""

from __future__ import annotations

from collections.abc import Sequence

from via_sd.runtime.decoding.drafters.protocol import Draft
from via_sd.runtime.decoding.passes import Passes


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

    def propose(self, sequence: Sequence[int], limit: int) -> Passes[Draft]:
        """See `Drafter.propose`."""
        yield from ()  # no pass is needed
        return self.lookup(sequence, limit)

    def lookup(self, sequence: Sequence[int], limit: int) -> Draft:
        """At most `limit` tokens; a copy that reaches the end of the sequence goes on with what it has copied."""
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
