"""Mode `routed`: the paper's VIA-SD (Algorithm 2, approximate)."""

from __future__ import annotations

from via_sd.runtime.decoding.audit import Audit
from via_sd.runtime.decoding.cost_model import RoundCost
from via_sd.runtime.decoding.drafters import Draft
from via_sd.runtime.decoding.passes import Passes
from via_sd.runtime.decoding.random_stream import Purpose
from via_sd.runtime.decoding.round_policy import FULL_ONLY, SLIM_FIRST, RoundPolicy, routed_policy
from via_sd.runtime.decoding.router import Route
from via_sd.runtime.decoding.run import Item, Run


def routed(run: Run) -> Passes[None]:
    """Some tokens are accepted by the slim-verifier alone.

    After one slim pass the router accepts drafted tokens, lets slim write its own, or escalates; the full verifier
    then judges the rest of the block, and audits for free what slim let through since it last looked. Unless the router
    is the paper's own, rounds in which slim would not earn its pass go straight to the full verifier.
    """
    yield from run.prefill()
    audit, policy, costs = Audit(run), routed_policy(run.options.costs), run.options.costs
    while not run.state.done:
        before = len(run.state.tokens)
        spent = RoundCost(run.cache, costs.full, before)
        draft, situation = yield from run.propose()
        way = _way(run, policy, draft)
        if way == SLIM_FIRST:
            kept = yield from _slim_first(run, draft, audit)
        else:
            kept = yield from audit.escalate(draft)
        run.learn(situation, draft, kept)
        emitted = len(run.state.tokens) - before
        cost = spent.of_full(emitted)
        if way == SLIM_FIRST:
            cost += costs.slim(len(draft.tokens) + 1)
        policy.learn(way, emitted, cost)
        run.end_round()
        yield None
    if run.routing.audit_tail:
        yield from audit.tail()


def _way(run: Run, policy: RoundPolicy, draft: Draft) -> str:
    """Whether the round begins with a slim pass."""
    routing = run.routing
    overdue = run.lag + len(draft.tokens) + 2 > routing.max_lag
    if overdue or routing.router.shut:
        return FULL_ONLY
    return SLIM_FIRST if routing.slim_always_first else policy.choose()


def _slim_first(run: Run, draft: Draft, audit: Audit) -> Passes[int]:
    """One slim pass and what the router makes of it; the number of drafted tokens that were accepted."""
    tokens, router, tightening = run.state.tokens, run.routing.router, run.routing.guard.tightening
    rows = yield from run.forward(run.options.slim, [*tokens, *draft.tokens], len(draft.tokens) + 1)
    for j, token in enumerate(draft.tokens):
        row = rows[j]
        # A token that is ruled out must neither be accepted nor make slim look sure.
        route = router.route(run.processor.constrained(row, tokens), token, tightening)
        if route is Route.ESCALATE:
            run.counters.escalations += 1
            rest = Draft(draft.tokens[j:], draft.distributions[j:])
            return j + (yield from audit.escalate(rest, row))
        if route is Route.REGENERATE:
            audit.let_through(Item(run.sample(row, tokens, Purpose.SLIM_TOKEN), "slim", replaced=True), row)
            return j
        if not audit.let_through(Item(token, "draft"), row):
            return j + 1
    last = rows[len(draft.tokens)]
    if router.is_sure(run.processor.constrained(last, tokens), tightening):
        audit.let_through(Item(run.sample(last, tokens, Purpose.SLIM_TOKEN), "slim"), last)
    elif not draft.tokens:
        run.counters.escalations += 1
        yield from audit.escalate(draft, last)
    return len(draft.tokens)
