"""The decoding modes, one generator function each: every `yield` ends a round, after its tokens were emitted.

Every chunk of a long prompt yields, too: before the first round those of the verifier, behind it the drafter's.

What is fed to which tier after each event: docs/architecture.md#cache-table.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import repeat

import numpy as np

from via_sd.contract.graphs import FULL
from via_sd.contract.mode_names import CASCADE, PLAIN, ROUTED, SPECULATIVE
from via_sd.runtime.decoding.cost_model import CascadeBlock, SlimOrFull
from via_sd.runtime.decoding.drafters import Draft
from via_sd.runtime.decoding.router import Route
from via_sd.runtime.decoding.run import Item, Run
from via_sd.runtime.decoding.sampling import Purpose
from via_sd.runtime.decoding.statistics import JudgedMargin
from via_sd.runtime.engines.rows import Row

Mode = Callable[[Run], Generator[None, None, None]]


def plain(run: Run) -> Generator[None, None, None]:
    """Full verifier alone, a token a pass: the reference."""
    yield from run.start(drafting=False)
    while not run.done:
        row = run.forward(FULL, run.tokens, 1)[0]
        run.push(Item(run.choose(row, run.tokens, Purpose.FULL_TOKEN), "full"), row)
        run.end_round()
        yield


def speculative(run: Run) -> Generator[None, None, None]:
    """Drafter, then full verifier (exact): a block a pass, kept as far as the lossless test keeps it."""
    yield from run.start()
    while not run.done:
        _two_tier_round(run)
        run.end_round()
        yield


def _two_tier_round(run: Run) -> float:
    """Draft, full pass, lossless test; the cost of the round."""
    draft, situation = run.propose()
    rows = run.forward(FULL, [*run.tokens, *draft.tokens], len(draft.tokens) + 1)
    verdict = run.verify(draft, rows)
    run.learn(situation, min(verdict.kept + 1, len(draft.tokens)), verdict.kept)
    return run.costs(len(draft.tokens) + 1) + len(draft.tokens) * run.drafter.cost


def cascade(run: Run) -> Generator[None, None, None]:
    """Drafter, slim, full (exact): slim verifies several blocks losslessly, full then tests every token that is left.

    The tokens of the inner rounds follow slim's distribution, whatever was drafted, so the full verifier tests them
    against the very rows of slim they were drawn from. Where slim does not earn its passes a round leaves it out.
    """
    yield from run.start()
    block = CascadeBlock(run.costs, run.slim_cost)
    while not run.done:
        size = min(block.choose(), run.remaining - 1)
        before = len(run.tokens)
        if size < 1:
            cost = _two_tier_round(run)
            block.two_tier(len(run.tokens) - before, cost)
        else:
            _cascade_round(run, block, size)
        run.end_round()
        yield


def _cascade_round(run: Run, block: CascadeBlock, size: int) -> None:
    """Slim writes at least `size` tokens (fewer where the text or the buffer ends), full tests them."""
    pending: list[Item] = []
    proposal = Draft()
    while len(pending) < size and not run.stop_tokens.intersection(proposal.tokens):
        draft, situation = run.propose(proposal.tokens)
        context = [*run.tokens, *proposal.tokens]
        rows = run.forward(run.slim, [*context, *draft.tokens], len(draft.tokens) + 1)
        verdict = run.test(rows, draft, context, Purpose.SLIM_TEST, Purpose.SLIM_TOKEN)
        run.learn(situation, min(verdict.kept + 1, len(draft.tokens)), verdict.kept)
        block.slim_pass(verdict.kept + 1)
        pending += [Item(token, "draft") for token in draft.tokens[: verdict.kept]]
        pending.append(Item(verdict.token, "slim", replaced=verdict.kept < len(draft.tokens)))
        proposal.tokens.extend([*draft.tokens[: verdict.kept], verdict.token])
        proposal.distributions.extend(
            verdict.distributions if verdict.distributions else repeat(None, verdict.kept + 1)
        )
        run.truncate(len(run.tokens) + len(pending))
    rows = run.forward(FULL, [*run.tokens, *proposal.tokens], len(pending) + 1)
    outcome = run.test(rows, proposal, run.tokens, Purpose.FULL_TEST, Purpose.FULL_TOKEN)
    block.judged(min(outcome.kept + 1, len(pending)), outcome.kept)
    run.conclude(pending, outcome, rows)


def routed(run: Run) -> Generator[None, None, None]:
    """The paper's VIA-SD (Algorithm 2, approximate): some tokens are accepted by the slim-verifier alone.

    After one slim pass the router accepts drafted tokens, lets slim write its own, or escalates; the full verifier
    then judges the rest of the block, and audits for free what slim let through since it last looked. Unless the router
    is the paper's own, rounds in which slim would not earn its pass go straight to the full verifier.
    """
    yield from run.start()
    audit, choice = _Audit(run), SlimOrFull(run.slim_cost)
    while not run.done:
        before, full_before = len(run.tokens), run.cache.usage[FULL].tokens
        pending = before - 1 - run.cache.lengths[FULL]
        draft, situation = run.propose()
        length = len(draft.tokens)
        overdue = before - run.cache.lengths[FULL] + length + 1 > run.max_lag
        open_to_slim = not overdue and not run.router.shut
        slim_first = open_to_slim and (run.slim_always_first or choice.slim_first())
        kept = _route_block(run, draft, audit) if slim_first else audit.escalate(draft)
        run.learn(situation, min(kept + 1, length), kept)
        fed = run.cache.usage[FULL].tokens - full_before
        # What is not cached for full now has to be fed later: the cost belongs to this round, not to the later one.
        cost = run.costs(fed - pending) if fed else run.costs.per_token * (len(run.tokens) - before)
        if slim_first:
            cost += run.slim_cost * run.costs(length + 1)
        choice.learn("slim" if slim_first else "full", len(run.tokens) - before, cost)
        run.end_round()
        yield
    if run.audit_tail:
        audit.tail()


def _route_block(run: Run, draft: Draft, audit: _Audit) -> int:
    """One slim pass and what the router makes of it; the number of drafted tokens it accepted."""
    rows = run.forward(run.slim, [*run.tokens, *draft.tokens], len(draft.tokens) + 1)
    tightening = run.guard.tightening
    for j, token in enumerate(draft.tokens):
        row = rows[j]
        route = run.router.route(row, token, tightening)
        if route is Route.ESCALATE:
            run.counters.escalations += 1
            return j + audit.escalate(Draft(draft.tokens[j:], draft.distributions[j:]), row)
        if route is Route.REGENERATE:
            audit.let_through(Item(run.choose(row, run.tokens, Purpose.SLIM_TOKEN), "slim", replaced=True), row)
            return j
        if not audit.let_through(Item(token, "draft"), row):
            return j + 1
    last = rows[len(draft.tokens)]
    if run.router.is_sure(last, tightening):
        audit.let_through(Item(run.choose(last, run.tokens, Purpose.SLIM_TOKEN), "slim"), last)
    elif not draft.tokens:
        run.counters.escalations += 1
        audit.escalate(draft, last)
    return len(draft.tokens)


class _Audit:
    """What the full verifier would have said about tokens that the slim-verifier accepted alone."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._distributions: list[np.ndarray] = []  # slim's, of the tokens it let through (temperature > 0)
        self._noted: list[tuple[int, float, int]] = []  # where full has not been: position, slim's margin and best

    def let_through(self, item: Item, row: Row) -> bool:
        """Emit a token that the slim-verifier accepts alone."""
        run = self._run
        self._note(row)
        if not run.processor.config.greedy:
            self._distributions.append(run.processor.probabilities(row, run.tokens))
        return run.push(item, row, checked=False)

    def escalate(self, draft: Draft, doubted: Row | None = None) -> int:
        """A full pass over everything not cached for full and `draft`, which it judges alone; how much of it is kept.

        `doubted` is the row of slim's on which the router escalated.
        """
        run = self._run
        if doubted is not None:
            self._note(doubted)
        pending = len(run.tokens) - 1 - run.cache.lengths[FULL]
        rows = run.forward(FULL, [*run.tokens, *draft.tokens], pending + len(draft.tokens) + 1)
        self._compare(rows, pending)
        return run.verify(draft, rows[pending:]).kept

    def tail(self) -> None:
        """Judge what is left at the end of the text, so that every token was judged."""
        run = self._run
        pending = len(run.tokens) - 1 - run.cache.lengths[FULL]
        if pending > 0:
            self._compare(run.forward(FULL, run.tokens[:-1], pending), pending)

    def _note(self, row: Row) -> None:
        if self._run.keep_margins:
            self._noted.append((self._run.counters.emitted_tokens, row.margin(), row.argmax()))

    def _compare(self, rows: Sequence[Row], count: int) -> None:
        """Compare `count` of full's `rows` with the last emitted tokens: argmax, or overlap of distributions."""
        run = self._run
        # Where the router escalated, there is one more of slim's rows than tokens it accepted.
        for (position, margin, token), row in zip(self._noted, rows, strict=False):
            run.counters.margins.append(JudgedMargin(position, margin, row.argmax() == token))
        self._noted.clear()
        rows = rows[:count]
        before, audited = run.tokens[: len(run.tokens) - count], run.tokens[len(run.tokens) - count :]
        if run.processor.config.greedy:
            best = (run.processor.best(row, before, audited[:j]) for j, row in enumerate(rows))
            apart = [float(b != token) for b, token in zip(best, audited, strict=True)]
        else:
            distributions = [run.processor.probabilities(row, before, audited[:j]) for j, row in enumerate(rows)]
            apart = [1 - float(np.minimum(q, u).sum()) for q, u in zip(distributions, self._distributions, strict=True)]
            self._distributions.clear()
        run.counters.checked += count
        run.counters.audited += count
        run.counters.disagreement += sum(apart)
        run.guard.audited(apart)


MODE_FUNCTIONS: dict[str, Mode] = {PLAIN: plain, SPECULATIVE: speculative, CASCADE: cascade, ROUTED: routed}
