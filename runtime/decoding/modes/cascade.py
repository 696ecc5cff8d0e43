"""Mode `cascade`: drafter, slim-verifier, full verifier (exact)."""

from __future__ import annotations

from collections.abc import Generator
from itertools import repeat

from via_sd.contract.graphs import FULL
from via_sd.runtime.decoding.drafters import Draft
from via_sd.runtime.decoding.modes.speculative import speculative_round
from via_sd.runtime.decoding.random_stream import Purpose
from via_sd.runtime.decoding.round_policy import CascadeBlock
from via_sd.runtime.decoding.run import Item, Run


def cascade(run: Run) -> Generator[None, None, None]:
    """Slim verifies several blocks losslessly, full then tests every token that is left.

    The tokens of the inner rounds follow slim's distribution, whatever was drafted, so the full verifier tests them
    against the very rows of slim they were drawn from. Where slim does not earn its passes a round leaves it out.
    """
    yield from run.prefill()
    state, costs = run.state, run.options.costs
    block = CascadeBlock(costs)
    while not state.done:
        size = min(block.choose(), state.remaining - 1)
        if size < 1:
            before = len(state.tokens)
            drafted = speculative_round(run)
            block.two_tier(len(state.tokens) - before, costs.full(drafted + 1) + drafted * run.drafter.cost)
        else:
            _three_tier_round(run, block, size)
        run.end_round()
        yield


def _three_tier_round(run: Run, block: CascadeBlock, size: int) -> None:
    """Slim writes at least `size` tokens (fewer where the text or the buffer ends), full tests them."""
    tokens, slim = run.state.tokens, run.options.slim
    pending: list[Item] = []
    proposal = Draft()
    while len(pending) < size and not run.options.stop_tokens.intersection(proposal.tokens):
        draft, situation = run.propose(proposal.tokens)
        context = [*tokens, *proposal.tokens]
        rows = run.forward(slim, [*context, *draft.tokens], len(draft.tokens) + 1)
        verdict = run.test(rows, draft, context, Purpose.SLIM_TEST, Purpose.SLIM_TOKEN)
        run.learn(situation, draft, verdict.kept)
        block.slim_pass(verdict.kept + 1)
        kept = draft.tokens[: verdict.kept]
        pending += [Item(token, "draft") for token in kept]
        pending.append(Item(verdict.token, "slim", replaced=verdict.kept < len(draft.tokens)))
        proposal.tokens.extend([*kept, verdict.token])
        proposal.distributions.extend(verdict.distributions or repeat(None, verdict.kept + 1))
        run.truncate(len(tokens) + len(pending))
    rows = run.forward(FULL, [*tokens, *proposal.tokens], len(pending) + 1)
    verdict = run.test(rows, proposal, tokens, Purpose.FULL_TEST, Purpose.FULL_TOKEN)
    block.judged(min(verdict.kept + 1, len(pending)), verdict.kept)
    run.conclude(pending, verdict, rows)
