"""A drafter that knows what a request rules out, and what it forces."""

from __future__ import annotations

from collections.abc import Sequence

from via_sd.runtime.decoding.drafters.protocol import Draft, Drafter
from via_sd.runtime.decoding.passes import Passes
from via_sd.runtime.decoding.sampling import Processor

#: The class of situations in which tokens are forced (see `Drafter.expectation`): nearly all of them are accepted.
_FORCED = 8


class ConstrainedDrafter:
    """Proposes the tokens that a constraint forces, then those of another drafter up to the first that is ruled out.

    Tokens that were drawn are never ruled out, since the other drafter draws by the same constraints. So a cut depends
    on nothing that was drawn, and the tokens that are left keep their distributions.
    """

    def __init__(self, drafter: Drafter, processor: Processor) -> None:
        self._drafter, self._processor = drafter, processor
        self.cost = drafter.cost

    @property
    def seconds(self) -> float:
        """See `Drafter.seconds`."""
        return self._drafter.seconds

    @property
    def calls(self) -> int:
        """See `Drafter.calls`."""
        return self._drafter.calls

    def propose(self, sequence: Sequence[int], limit: int) -> Passes[Draft]:
        """See `Drafter.propose`."""
        tokens = self._processor.forced(sequence)[:limit]
        draft = Draft(tokens, [None] * len(tokens))
        if len(tokens) < limit:
            more = yield from self._drafter.propose([*sequence, *tokens], limit - len(tokens))
            kept = self._processor.allowed([*sequence, *tokens], more.tokens)
            draft.tokens.extend(more.tokens[:kept])
            draft.distributions.extend(more.distributions[:kept])
        return draft

    def expectation(self, sequence: Sequence[int]) -> int:
        """See `Drafter.expectation`."""
        return _FORCED if self._processor.forced(sequence) else self._drafter.expectation(sequence)

    def truncate(self, length: int) -> None:
        """See `Drafter.truncate`."""
        self._drafter.truncate(length)
