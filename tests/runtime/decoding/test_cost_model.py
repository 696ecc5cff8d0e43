"""Whether slim earns its passes: what a round is charged, and that the way that pays is the one taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pipelines import table_pipeline
from tests.support.table_engine import TableEngine, hashed_logits
from via_sd.runtime.decoding.block_length import AdaptiveGamma
from via_sd.runtime.decoding.cost_model import CostModel, StepCost
from via_sd.runtime.decoding.passes import ALONE, Beside
from via_sd.runtime.decoding.round_policy import FULL_ONLY, SLIM_FIRST, RoundPolicy, routed_policy
from via_sd.runtime.generation.policy import Policy

VOCAB = 9
SLOPE = 0.05
COST = {1: 1.0, 16: 1.0 + 15 * SLOPE}
SLIM_COST = {1: 0.4, 16: 0.9}


@pytest.mark.parametrize("slim_cost", [0.3, 0.66, 0.9])
@pytest.mark.parametrize(("slim", "full"), [(2.0, 1.0), (1.0, 2.0), (1.0, 1.3), (1.3, 1.0)])
def test_the_way_that_brings_more_tokens_for_its_cost_is_taken_most_of_the_time(
    slim: float, full: float, slim_cost: float
) -> None:
    """`slim` and `full`: tokens per cost of the rounds of each way."""
    policy = routed_policy(CostModel(StepCost(COST), StepCost({1: slim_cost, 16: slim_cost})))
    taken = []
    for _ in range(400):
        way = policy.choose()
        taken.append(way)
        policy.learn(way, 2, 2 / (slim if way == SLIM_FIRST else full))
    late = taken[200:].count(SLIM_FIRST) / 200
    assert late > 0.9 if slim > full else late < 0.1


def test_a_way_that_was_left_is_tried_again() -> None:
    policy = routed_policy(CostModel(StepCost(COST), StepCost(SLIM_COST)))
    for _ in range(20):
        policy.learn(SLIM_FIRST, 1, 5.0)
    assert policy.choose() == FULL_ONLY
    for _ in range(500):
        policy.learn(FULL_ONLY, 1, 1.0)
    assert policy.choose() == SLIM_FIRST


@pytest.mark.parametrize("beside", [ALONE, Beside(3, 3), Beside(7, 7), Beside(7, 20)])
@pytest.mark.parametrize("accepted", [0.3, 0.6, 0.9, 0.98])
@pytest.mark.parametrize("cost", [COST, {1: 1.0, 2: 1.37, 4: 2.06, 8: 3.27, 16: 5.75}], ids=["flat", "steep"])
def test_a_draft_is_as_long_as_makes_all_sequences_of_its_pass_together_fastest(
    cost: dict[int, float], accepted: float, beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    gamma = AdaptiveGamma(StepCost(cost))
    monkeypatch.setattr(gamma, "acceptance", lambda situation: accepted)
    others = (beside.sequences + beside.tokens) / 2

    def rate(length: int) -> float:
        own = sum(accepted**index for index in range(length + 1))
        return (own + others) / StepCost(cost)(beside.tokens + 1 + length)

    best = max(rate(length) for length in range(16))
    assert rate(gamma.choose(3, 15, beside=beside)) == best


@pytest.mark.parametrize("router", ["paper", "adaptive"])
def test_rounds_are_charged_for_all_passes_and_for_what_full_has_still_to_read(
    router: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TableEngine(hashed_logits(VOCAB, slim=0.3), VOCAB)
    policy = Policy({"mode": "plain"}, "plain", COST, SLIM_COST)
    pipeline = table_pipeline(engine, tmp_path, policy=policy)
    charged: list[float] = []
    learn = RoundPolicy.learn

    def told(self: RoundPolicy, way: str, tokens: int, cost: float) -> None:
        charged.append(cost)
        learn(self, way, tokens, cost)

    monkeypatch.setattr(RoundPolicy, "learn", told)
    found = pipeline.generate("abcabc", mode="routed", router=router, alpha2=0.8, raw=True, max_new_tokens=150)
    assert {"draft", "slim", "full"} == set(found.tiers)
    costs = {"full": StepCost(COST), "slim": StepCost(SLIM_COST)}
    calls = engine.buffers[0].calls[1:]  # behind the prompt
    spent = sum(costs[call.tier](len(call.tokens)) for call in calls)
    unread = 6 + len(found.token_ids) - 1 - pipeline.current.verifier.lengths["full"]
    assert sum(charged) == pytest.approx(spent + SLOPE * unread)
