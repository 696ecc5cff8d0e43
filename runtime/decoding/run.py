"""One sequence being decoded: the state all modes share, and the lossless test they are built from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from via_sd.contract.graphs import FULL
from via_sd.runtime.decoding.block_length import AdaptiveGamma, StepCost
from via_sd.runtime.decoding.cache import SequenceCache
from via_sd.runtime.decoding.drafters import Draft, Drafter
from via_sd.runtime.decoding.router import DivergenceGuard, Gates, Router
from via_sd.runtime.decoding.sampling import Processor, Purpose, acceptance, draw, residual, uniform
from via_sd.runtime.decoding.statistics import Counters
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


@dataclass(frozen=True)
class Verdict:
    """Outcome of a lossless test.

    Attributes:
        kept: number of drafted tokens kept.
        token: the verifier's own token behind them.
        distributions: the verifier's, of the kept + 1 rows that were tested; empty in greedy decoding.
    """

    kept: int
    token: int
    distributions: list[np.ndarray]


@dataclass
class Run:
    """One sequence being decoded.

    Attributes:
        tokens: prompt and everything emitted.
        seed: keys the random stream.
        emit: takes an emitted token, its tier and the row it was judged by; False if it completes the text.
        remaining: tokens that may still be emitted.
        capacity: positions the KV buffers hold.
        stop_tokens: tokens that end the text.
        costs: time of a full pass over S tokens, in passes over one.
        slim: the slim-verifier's tier, for the modes that have one.
        slim_cost: of a slim pass, in full passes over as many tokens.
        slim_always_first: whether `routed` asks slim first in every round, as the paper does.
        max_lag: most emitted tokens that the full verifier has not checked yet.
        audit_tail: whether `routed` ends with a full pass over what only slim has judged.
        keep_margins: whether `routed` notes in the statistics how slim's margins fared.
    """

    tokens: list[int]
    cache: SequenceCache
    drafter: Drafter
    gamma: AdaptiveGamma
    processor: Processor
    seed: int
    emit: Callable[[int, str, Row], bool]
    counters: Counters
    remaining: int
    capacity: int
    costs: StepCost
    stop_tokens: frozenset[int] = frozenset()
    slim: str = "slim"
    slim_cost: float = 0.7
    slim_always_first: bool = False
    router: Router = field(default_factory=Gates)
    guard: DivergenceGuard = field(default_factory=lambda: DivergenceGuard(None))
    max_lag: int = 64
    audit_tail: bool = False
    keep_margins: bool = False
    done: bool = False
    attempt: int = 0

    def forward(self, tier: str, sequence: Sequence[int], rows: int) -> Sequence[Row]:
        """A pass of a verifier tier; see `SequenceCache.run`."""
        self.attempt += 1
        return self.cache.run(tier, sequence, rows)

    def start(self, *, drafting: bool = True) -> Iterator[None]:
        """The first round: feed the prompt to the full verifier, emit its first token, let the drafter read."""
        yield from self.cache.chunks(FULL, self.tokens, 1)
        row = self.forward(FULL, self.tokens, 1)[0]
        self.push(Item(self.choose(row, self.tokens, Purpose.FULL_TOKEN), "full"), row)
        self.end_round()
        yield
        if drafting and not self.done:
            yield from self.drafter.read(self.tokens)

    def propose(self, pending: Sequence[int] = ()) -> tuple[Draft, int]:
        """A draft to follow the sequence and what is `pending`, and the situation it was made in."""
        context = [*self.tokens, *pending]
        # A round always adds one token of a verifier's own, and all that is fed must fit the buffers.
        limit = min(self.remaining - len(pending) - 1, self.capacity - len(context))
        situation = self.drafter.expectation(context) if limit > 0 else 0
        length = self.gamma.choose(situation, limit, self.drafter.cost)
        draft = self.drafter.propose(context, length) if length > 0 else Draft()
        self.counters.drafted += len(draft.tokens)
        self.counters.draft_rounds += bool(draft.tokens)
        return draft, situation

    def learn(self, situation: int, judged: int, kept: int) -> None:
        """A block drafted in `situation` had its first `judged` tokens looked at and its first `kept` accepted."""
        self.gamma.learn(situation, judged, kept)
        self.counters.block(judged, kept)

    def push(self, item: Item, row: Row, *, checked: bool = True) -> bool:
        """Emit one token that was judged by `row`; False once the text is complete.

        `checked` says whether the full verifier has judged it.
        """
        drafted = item.tier == "draft"
        self.tokens.append(item.token)
        self.remaining -= 1
        self.counters.accepted += drafted
        self.counters.evaluated += drafted + item.replaced
        self.counters.checked += checked
        self.counters.emitted(item.tier)
        if not self.emit(item.token, item.tier, row) or self.remaining <= 0:
            self.done = True
        return not self.done

    def end_round(self) -> None:
        """Drop the KV of rejected tokens and count the round."""
        self.truncate(len(self.tokens))
        self.counters.rounds += 1

    def truncate(self, length: int) -> None:
        """Cut all caches back to a sequence of `length` tokens, of which the last is not fed yet."""
        self.cache.truncate(length)
        self.drafter.truncate(length)

    def choose(self, row: Row, context: Sequence[int], purpose: Purpose) -> int:
        """A tier's own token to follow `context`, from its `row`."""
        if self.processor.config.greedy:
            return self.processor.best(row, context)
        return draw(self.processor.probabilities(row, context), uniform(self.seed, self.attempt, len(context), purpose))

    def test(
        self, rows: Sequence[Row], draft: Draft, context: Sequence[int], test: Purpose, replace: Purpose
    ) -> Verdict:
        """The lossless test of a draft (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2).

        Whatever the draft was drawn from, the kept tokens and the verifier's own follow the verifier's distribution.

        Args:
            rows: the verifier's, len(draft) + 1; row j follows `context` and j drafted tokens.
            test, replace: key the random numbers of the tests and of the verifier's own token.
        """
        tokens, kept = draft.tokens, 0
        if self.processor.config.greedy:
            best = self.processor.best(rows[0], context)
            while kept < len(tokens) and best == tokens[kept]:
                kept += 1
                best = self.processor.best(rows[kept], context, tokens[:kept])
            return Verdict(kept, best, [])
        distributions: list[np.ndarray] = []
        while True:
            probabilities = self.processor.probabilities(rows[kept], context, tokens[:kept])
            distributions.append(probabilities)
            position = len(context) + kept
            if kept == len(tokens):
                break
            token, proposal = tokens[kept], draft.distributions[kept]
            if uniform(self.seed, self.attempt, position, test) >= acceptance(probabilities, proposal, token):
                probabilities = residual(probabilities, proposal, token)
                break
            kept += 1
        return Verdict(kept, draw(probabilities, uniform(self.seed, self.attempt, position, replace)), distributions)

    def verify(self, draft: Draft, rows: Sequence[Row]) -> Verdict:
        """Test `draft` against the full verifier's `rows` and emit what follows from it."""
        verdict = self.test(rows, draft, self.tokens, Purpose.FULL_TEST, Purpose.FULL_TOKEN)
        self.conclude([Item(token, "draft") for token in draft.tokens], verdict, rows)
        return verdict

    def conclude(self, items: Sequence[Item], verdict: Verdict, rows: Sequence[Row]) -> None:
        """Emit the items the full verifier kept, then its own token, up to where the text ends."""
        for item, row in zip(items[: verdict.kept], rows, strict=False):
            if not self.push(item, row):
                return
        rejected = items[verdict.kept] if verdict.kept < len(items) else None
        replaced = rejected is not None and (rejected.tier == "draft" or rejected.replaced)
        self.push(Item(verdict.token, "full", replaced), rows[verdict.kept])
