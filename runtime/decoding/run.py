"""One sequence being decoded: what the decoding modes are written with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from via_sd.contract.graphs import FULL
from via_sd.runtime.decoding.block_length import AdaptiveGamma
from via_sd.runtime.decoding.cache import SequenceCache
from via_sd.runtime.decoding.cost_model import CostModel
from via_sd.runtime.decoding.drafters import Draft, Drafter
from via_sd.runtime.decoding.passes import ALONE, Beside, Passes
from via_sd.runtime.decoding.random_stream import Purpose, RandomStream
from via_sd.runtime.decoding.router import Routing
from via_sd.runtime.decoding.sampling import Processor, draw
from via_sd.runtime.decoding.statistics import Counters
from via_sd.runtime.decoding.verification import Verdict, lossless_test
from via_sd.runtime.engines.rows import Row


@dataclass(frozen=True)
class Item:
    """A token about to be emitted.

    Attributes:
        tier: where its authority comes from: draft, slim or full.
        replaced: whether it stands where a drafted token was rejected.
    """

    token: int
    tier: str
    replaced: bool = False


@dataclass
class SequenceState:
    """What changes with every token.

    Attributes:
        tokens: prompt and everything emitted.
        remaining: tokens that may still be emitted.
        done: whether the text is complete.
    """

    tokens: list[int]
    remaining: int
    done: bool = False


@dataclass(frozen=True)
class RunOptions:
    """What stays as it is while a sequence is decoded.

    Attributes:
        slim: the slim-verifier's tier, for the modes that have one.
        costs: what forward passes cost.
        capacity: positions the KV buffers hold.
        stop_tokens: tokens that end the text.
    """

    slim: str
    costs: CostModel
    capacity: int
    stop_tokens: frozenset[int]


@dataclass
class Run:
    """One sequence being decoded: its state, its options, and what works on it.

    Every forward pass of a verifier goes through `forward`, every emitted token through `emit`.

    Attributes:
        routing: what `routed` decides by.
        on_token: takes an emitted token, its tier and the row it was judged by; False if it completes the text.
    """

    state: SequenceState
    options: RunOptions
    routing: Routing
    cache: SequenceCache
    drafter: Drafter
    gamma: AdaptiveGamma
    processor: Processor
    random: RandomStream
    counters: Counters
    on_token: Callable[[int, str, Row], bool]

    # -- forward passes ------------------------------------------------------------------------------------------------

    def forward(self, tier: str, sequence: Sequence[int], rows: int) -> Passes[Sequence[Row]]:
        """A pass of a verifier tier; see `SequenceCache.forward`."""
        self.random.attempt += 1
        return self.cache.forward(tier, sequence, rows)

    def prefill(self) -> Passes[None]:
        """The first round: feed the prompt to the full verifier and emit its first token."""
        tokens = self.state.tokens
        (row,) = yield from self.forward(FULL, tokens, 1)
        self.emit(Item(self.sample(row, tokens, Purpose.FULL_TOKEN), "full"), row)
        self.end_round()
        yield None

    @property
    def lag(self) -> int:
        """Tokens before the last one that are not cached for the full verifier."""
        return len(self.state.tokens) - 1 - self.cache.lengths[FULL]

    # -- drafts --------------------------------------------------------------------------------------------------------

    def propose(self, beside: Beside = ALONE) -> Passes[tuple[Draft, int]]:
        """A draft to follow the sequence, and the situation it was made in.

        Args:
            beside: who shares the passes that judge it, where the text does not depend on how long the draft is.
        """
        situation, room = self.situation()
        draft = yield from self.draft((), self.gamma.choose(situation, room, self.drafter.cost, beside))
        return draft, situation

    def situation(self, pending: Sequence[int] = ()) -> tuple[int, int]:
        """The drafter's situation behind what is `pending` (0: nothing to propose), and how many tokens fit there."""
        # A round always adds one token of a verifier's own, and all that is fed must fit the buffers.
        length = len(self.state.tokens) + len(pending)
        room = max(0, min(self.state.remaining - len(pending) - 1, self.options.capacity - length))
        return self.drafter.expectation([*self.state.tokens, *pending]) if room else 0, room

    def draft(self, pending: Sequence[int], length: int) -> Passes[Draft]:
        """A draft of at most `length` tokens to follow the sequence and what is `pending`."""
        draft = Draft()
        if length > 0:
            draft = yield from self.drafter.propose([*self.state.tokens, *pending], length)
        self.counters.drafted += len(draft.tokens)
        self.counters.draft_rounds += bool(draft.tokens)
        return draft

    def learn(self, situation: int, draft: Draft, kept: int) -> None:
        """Of a draft made in `situation` the first `kept` tokens were accepted; the next, if any, was rejected."""
        judged = min(kept + 1, len(draft.tokens))
        self.gamma.learn(situation, judged, kept)
        self.counters.block(judged, kept)

    def test(
        self, rows: Sequence[Row], draft: Draft, context: Sequence[int], test: Purpose, replace: Purpose
    ) -> Verdict:
        """The lossless test of a draft; see `lossless_test`."""
        return lossless_test(self.processor, rows, draft, context, self.random, test, replace)

    def sample(self, row: Row, context: Sequence[int], purpose: Purpose) -> int:
        """A tier's own token to follow `context`, from its `row`."""
        if self.processor.greedy:
            return self.processor.best(row, context)
        return draw(self.processor.probabilities(row, context), self.random.uniform(len(context), purpose))

    # -- emission ------------------------------------------------------------------------------------------------------

    def emit(self, item: Item, row: Row, *, checked: bool = True) -> bool:
        """Emit one token that was judged by `row`; False once the text is complete.

        `checked` says whether the full verifier has judged it.

        Raises:
            RequestError: the request rules out every token here.
        """
        state, counters = self.state, self.counters
        drafted = item.tier == "draft"
        self.processor.check(state.tokens)
        state.tokens.append(item.token)
        state.remaining -= 1
        counters.accepted += drafted
        counters.evaluated += drafted + item.replaced
        counters.checked += checked
        counters.emitted(item.tier)
        if not self.on_token(item.token, item.tier, row) or state.remaining <= 0:
            state.done = True
        return not state.done

    def verify(self, draft: Draft, rows: Sequence[Row]) -> int:
        """Test `draft` against the full verifier's `rows` and emit what follows from it; how much of it was kept."""
        verdict = self.test(rows, draft, self.state.tokens, Purpose.FULL_TEST, Purpose.FULL_TOKEN)
        self.conclude([Item(token, "draft") for token in draft.tokens], verdict, rows)
        return verdict.kept

    def conclude(self, items: Sequence[Item], verdict: Verdict, rows: Sequence[Row]) -> None:
        """Emit the items the full verifier kept, then its own token, up to where the text ends."""
        for item, row in zip(items[: verdict.kept], rows, strict=False):
            if not self.emit(item, row):
                return
        rejected = items[verdict.kept] if verdict.kept < len(items) else None
        replaced = rejected is not None and (rejected.tier == "draft" or rejected.replaced)
        self.emit(Item(verdict.token, "full", replaced), rows[verdict.kept])

    # -- rounds --------------------------------------------------------------------------------------------------------

    def end_round(self) -> None:
        """Drop the KV of rejected tokens and count the round."""
        self.truncate(len(self.state.tokens))
        self.counters.rounds += 1
        if self.counters.rounds == 1:
            self.counters.seconds["prefill"] = self.cache.usage[FULL].seconds

    def truncate(self, length: int) -> None:
        """Cut all caches back to a sequence of `length` tokens, of which the last is not fed yet."""
        self.cache.truncate(length)
        self.drafter.truncate(length)

    def stop_clock(self) -> None:
        """Read the engines' meters: the text is complete."""
        counters, usage = self.counters, self.cache.usage
        if counters.rounds == 0:  # the prompt was not read to its end
            counters.seconds["prefill"] = usage[FULL].seconds
        counters.full_calls, counters.full_tokens = usage[FULL].calls, usage[FULL].tokens
        counters.seconds["full"] = usage[FULL].seconds - counters.seconds["prefill"]
        if self.options.slim != FULL:
            slim = usage[self.options.slim]
            counters.slim_calls, counters.seconds["slim"] = slim.calls, slim.seconds
        counters.draft_calls, counters.seconds["draft"] = self.drafter.calls, self.drafter.seconds
        counters.stop()
