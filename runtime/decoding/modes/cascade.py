"""Mode `cascade`: drafter, slim-verifier, full verifier (exact)."""

from __future__ import annotations

from itertools import repeat

from via_sd.contract.graphs import FULL
from via_sd.runtime.decoding.drafters import Draft
from via_sd.runtime.decoding.passes import Passes
from via_sd.runtime.decoding.planner import CascadePlanner, Pass
from via_sd.runtime.decoding.random_stream import Purpose
from via_sd.runtime.decoding.run import Item, Run


def cascade(run: Run) -> Passes[None]:
    """Slim writes and verifies tokens for as long as that pays, then a full pass tests all of them.

    The tokens of the slim passes follow slim's distribution, whatever was drafted, so the full verifier tests them
    against the very rows of slim they were drawn from; a draft behind them it tests as in `speculative`. When a round
    ends is decided by what was drawn already and never drops a draw, so that the output follows full's distribution.
    """
    yield from run.prefill()
    planner = CascadePlanner(run.options.costs, run.gamma.acceptance)
    while not run.state.done:
        yield from _round(run, planner)
        run.end_round()
        yield None


def _round(run: Run, planner: CascadePlanner) -> Passes[None]:
    """Slim passes as the planner wants them, then the full pass that ends the round."""
    tokens, slim = run.state.tokens, run.options.slim
    items: list[Item] = []
    pending = Draft()
    situation, room = run.situation()
    if run.processor.greedy:  # the text is the same whatever the passes; a drawn one must not depend on others
        planner.begin(situation, run.cache.beside[FULL], run.cache.beside[slim])
    else:
        planner.begin(situation)
    while (step := planner.choose(situation, room)).slim:
        context = [*tokens, *pending.tokens]
        draft = yield from run.draft(pending.tokens, _draft_length(run, step, situation, room))
        rows = yield from run.forward(slim, [*context, *draft.tokens], len(draft.tokens) + 1)
        verdict = run.test(rows, draft, context, Purpose.SLIM_TEST, Purpose.SLIM_TOKEN)
        run.learn(situation, draft, verdict.kept)
        planner.wrote([row.margin() for row in rows[: verdict.kept + 1]])
        kept = draft.tokens[: verdict.kept]
        items += [Item(token, "draft") for token in kept]
        items.append(Item(verdict.token, "slim", replaced=verdict.kept < len(draft.tokens)))
        pending.tokens.extend([*kept, verdict.token])
        pending.distributions.extend(verdict.distributions or repeat(None, verdict.kept + 1))
        run.truncate(len(tokens) + len(items))
        situation, room = run.situation(pending.tokens)
        if run.options.stop_tokens.intersection(pending.tokens):
            situation = room = 0
    draft = yield from run.draft(pending.tokens, _draft_length(run, step, situation, room))
    proposal = Draft([*pending.tokens, *draft.tokens], [*pending.distributions, *draft.distributions])
    rows = yield from run.forward(FULL, [*tokens, *proposal.tokens], len(proposal.tokens) + 1)
    verdict = run.test(rows, proposal, tokens, Purpose.FULL_TEST, Purpose.FULL_TOKEN)
    planner.judged(min(verdict.kept, len(items)))
    if verdict.kept >= len(items):
        run.learn(situation, draft, verdict.kept - len(items))
    run.conclude([*items, *(Item(token, "draft") for token in draft.tokens)], verdict, rows)


def _draft_length(run: Run, step: Pass, situation: int, room: int) -> int:
    """Length of the draft of a pass: as planned, or as the request fixed it."""
    if run.gamma.fixed is None or situation == 0:
        return step.draft_length
    return min(run.gamma.fixed, room - step.slim)  # a slim pass adds a token of its own
