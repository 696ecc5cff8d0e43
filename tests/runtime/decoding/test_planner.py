"""The planner of a cascade round: what it does at the extremes, and that it is close to the best fixed policy."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from via_sd.masks import Mask
from via_sd.runtime.decoding.cost_model import CostModel, StepCost
from via_sd.runtime.decoding.passes import Beside
from via_sd.runtime.decoding.planner import CascadePlanner, Pass
from via_sd.runtime.decoding.slim_agreement import EIGHT_BITS, OTHERS, SlimAgreement, expected_agreement

#: A float32 verifier of 135M parameters and its int8 slim-verifier on two cores.
FULL = StepCost({1: 1.0, 2: 1.03, 4: 1.09, 8: 1.29, 16: 1.72})
SLIM = StepCost({1: 0.36, 2: 0.44, 4: 0.62, 8: 0.93, 16: 1.57})
SURE, UNSURE = 5.0, 0.1


def never(_: int) -> float:
    return 0.0


def by_match(situation: int) -> float:
    """Acceptance of n-gram drafts by the length of the match."""
    return (0.0, 0.2, 0.45, 0.65, 0.75, 0.8, 0.85, 0.9)[min(situation, 7)]


def taught(planner: CascadePlanner, kept: Callable[[float], bool], margins: list[float], rounds: int = 200) -> None:
    """Show the planner rounds in which slim wrote one token of each margin."""
    for index in range(rounds):
        planner.begin(0)
        planner.wrote([margins[index % len(margins)]])
        planner.judged(int(kept(margins[index % len(margins)])))


def test_a_slim_verifier_that_costs_as_much_as_full_is_left_out():
    planner = CascadePlanner(CostModel(FULL, FULL), by_match)
    for situation in range(8):
        planner.begin(situation)
        assert not planner.choose(situation, 100).slim


def test_a_slim_verifier_that_full_does_not_agree_with_is_left_out():
    planner = CascadePlanner(CostModel(FULL, SLIM), never)
    taught(planner, lambda _: False, [SURE, 1.0, UNSURE])
    planner.begin(0)
    assert planner.choose(0, 100) == Pass(slim=False, draft_length=0)


def test_a_slim_verifier_that_pays_alone_is_left_out_of_passes_that_are_full():
    """With eight sequences in a pass, weights are read for all at once, and what counts is the work for each token."""
    steep = {1: 1.0, 2: 1.37, 4: 2.06, 8: 3.27, 16: 5.75}
    costs = CostModel(StepCost(steep), StepCost({size: 0.45 * cost for size, cost in steep.items()}))
    planner = CascadePlanner(costs, never)
    taught(planner, lambda _: True, [SURE])
    planner.begin(0)
    assert planner.choose(0, 100).slim
    planner.begin(0, Beside(7, 7), Beside(7, 7))
    assert planner.choose(0, 100) == Pass(slim=False, draft_length=0)
    planner.begin(0)
    assert planner.choose(0, 100).slim


@pytest.mark.parametrize("cost", [0.3, 0.4, 0.5, 0.55, 0.6])
def test_a_round_begins_with_slim_where_that_promises_more_than_a_full_pass(cost: float):
    """The promise is that slim stops where it is unsure; a look ahead that knows nothing of margins promises less."""
    full = StepCost({1: 1.0, 2: 1.2, 4: 1.42, 8: 1.76, 16: 2.27, 32: 3.24})
    slim = StepCost({size: cost * (1 + 0.12 * (size - 1)) for size in (1, 2, 4, 8, 16, 32)})
    planner = CascadePlanner(CostModel(full, slim, agreement=EIGHT_BITS), never)
    planner.begin(0)
    assert planner.choose(0, 100) == Pass(slim=True, draft_length=0)


def test_a_slim_verifier_in_eight_bits_is_expected_to_agree_most():
    whole = Mask.from_layers([True] * 4)
    assert expected_agreement(whole.in_precision("int8")) == EIGHT_BITS
    skipping = Mask.from_layers([True, False, True, True]).in_precision("int8")
    for other in (None, whole.in_precision("int4"), skipping):
        assert expected_agreement(other) == OTHERS
    rates = [SlimAgreement(prior).mean() for prior in (OTHERS, EIGHT_BITS)]
    assert rates[0] < rates[1] < 1
    assert sum(EIGHT_BITS.share) == pytest.approx(1)
    assert sum(OTHERS.share) == pytest.approx(1)


def test_slim_writes_until_it_is_unsure():
    planner = CascadePlanner(CostModel(FULL, SLIM), never)
    taught(planner, lambda margin: margin > 0.3, [SURE, 1.0, UNSURE])
    planner.begin(0)
    for _ in range(6):
        assert planner.choose(0, 100) == Pass(slim=True, draft_length=0)
        planner.wrote([SURE])
    planner.wrote([UNSURE])
    assert not planner.choose(0, 100).slim


def test_a_long_match_goes_to_full_directly_and_a_short_one_does_not():
    planner = CascadePlanner(CostModel(FULL, SLIM), by_match)
    planner.begin(7)
    chosen = planner.choose(7, 100)
    assert not chosen.slim
    assert chosen.draft_length >= 8
    planner.begin(1)
    assert planner.choose(1, 100).slim


def test_slim_judges_a_draft_where_full_is_dear():
    """A further token costs full a quarter of a pass, as where arithmetic is the limit, and slim hardly anything."""
    dear = StepCost({1: 1.0, 16: 4.75})
    cheap = StepCost({1: 0.2, 16: 0.3})
    planner = CascadePlanner(CostModel(dear, cheap), by_match)
    planner.begin(4)
    chosen = planner.choose(4, 100)
    assert chosen.slim
    assert chosen.draft_length > 0


@pytest.mark.parametrize("room", [0, 1, 2, 5])
def test_a_pass_never_drafts_more_than_there_is_room_for(room):
    planner = CascadePlanner(CostModel(FULL, SLIM), by_match)
    for situation in range(8):
        planner.begin(situation)
        chosen = planner.choose(situation, room)
        assert chosen.draft_length <= (room - 1 if chosen.slim else room)
        assert room or not chosen.slim


def test_a_round_ends():
    planner = CascadePlanner(CostModel(FULL, StepCost({1: 1e-6, 16: 1e-6})), never)
    taught(planner, lambda _: True, [SURE])
    planner.begin(0)
    passes = 0
    while planner.choose(0, 10_000).slim:
        planner.wrote([SURE])
        passes += 1
        assert passes <= 32
    assert passes > 8


def test_agreement_is_learned_by_margin():
    agreement = SlimAgreement()
    before = agreement.rate(agreement.classify(UNSURE))
    for _ in range(50):
        agreement.judged(agreement.classify(UNSURE), kept=False)
    assert agreement.rate(agreement.classify(UNSURE)) < 0.4 * before
    assert agreement.rate(agreement.classify(SURE)) == SlimAgreement().rate(agreement.classify(SURE))


def rate_of(policy: Callable[[random.Random], tuple[int, float]], tokens: int = 4000) -> float:
    """Tokens per cost of a policy that plays one round at a time."""
    source = random.Random(0)
    emitted, cost = 0, 0.0
    while emitted < tokens:
        more, paid = policy(source)
        emitted, cost = emitted + more, cost + paid
    return emitted / cost


def written(source: random.Random, unsure: float, right: float) -> tuple[float, bool]:
    """A token of slim's: its margin, and whether full keeps it."""
    if source.random() < unsure:
        return UNSURE, source.random() < right
    return SURE, True


@pytest.mark.parametrize(("unsure", "right"), [(0.05, 0.7), (0.1, 0.75), (0.25, 0.6), (0.5, 0.9), (0.9, 0.3)])
def test_it_is_as_good_as_the_best_fixed_policy(unsure: float, right: float):
    """Where slim is unsure of a share of its tokens, of which full keeps some: against blocks of every length, ended at
    an unsure token or not.
    """

    def fixed(size: int, stop_when_unsure: bool) -> Callable[[random.Random], tuple[int, float]]:
        def play(source: random.Random) -> tuple[int, float]:
            tokens = []
            while len(tokens) < size and not (stop_when_unsure and tokens and tokens[-1][0] == UNSURE):
                tokens.append(written(source, unsure, right))
            kept = next((i for i, (_, good) in enumerate(tokens) if not good), len(tokens))
            return kept + 1, len(tokens) * SLIM(1) + FULL(len(tokens) + 1)

        return play

    planner = CascadePlanner(CostModel(FULL, SLIM), never)

    def planned(source: random.Random) -> tuple[int, float]:
        planner.begin(0)
        tokens: list[tuple[float, bool]] = []
        while planner.choose(0, 1000).slim:
            tokens.append(written(source, unsure, right))
            planner.wrote([tokens[-1][0]])
        kept = next((i for i, (_, good) in enumerate(tokens) if not good), len(tokens))
        planner.judged(kept)
        return kept + 1, len(tokens) * SLIM(1) + FULL(len(tokens) + 1)

    best = max(rate_of(fixed(size, stop)) for size in range(25) for stop in (False, True))
    assert rate_of(planned) >= 0.97 * best


def test_the_same_rounds_give_the_same_passes():
    def passes() -> list[Pass]:
        source, planner = random.Random(3), CascadePlanner(CostModel(FULL, SLIM), by_match)
        chosen = []
        for _ in range(50):
            situation = source.randrange(8)
            planner.begin(situation)
            while (step := planner.choose(situation, 50)).slim:
                chosen.append(step)
                planner.wrote([source.random() * 3 for _ in range(step.draft_length + 1)])
            planner.judged(source.randrange(3))
            chosen.append(step)
        return chosen

    assert passes() == passes()
