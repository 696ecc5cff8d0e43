"""Which pass a round of `cascade` makes next: one of the slim-verifier, or the full verifier's that ends the round.

A round collects *pending* tokens, which slim wrote or accepted, until a full pass tests them all. Three ways go on from
any point of it, and the planner takes the one that promises most:

    n-gram to full           the full pass tests the pending tokens and a draft behind them
    n-gram to slim to full   a slim pass over a draft adds those of its tokens that slim keeps, and one of slim's own
    slim writes              a slim pass over one token adds a token of slim's own

Costs are in passes of the full verifier over one token. Everything here follows token counts, slim's margins and frozen
costs, never a clock: the same seed gives the same passes, but for a greedy text that shares them with others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from via_sd.runtime.decoding.cost_model import CostModel
from via_sd.runtime.decoding.passes import ALONE, Beside
from via_sd.runtime.decoding.slim_agreement import SlimAgreement

#: Lengths of a draft that is put to slim. Longer ones than the last are put to the full verifier, where they cost less.
_SLIM_DRAFTS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
#: Longest draft behind the pending tokens in a full pass.
_FULL_DRAFT = 15
#: Most pending tokens: a full pass over more is as long as a chunk of a prompt.
_MOST_PENDING = 32
#: Slim passes over one token that a plan looks ahead.
_HORIZON = 24


@dataclass(frozen=True)
class Pass:
    """The next pass: of slim, or of the full verifier, over the pending tokens and a draft of `draft_length`."""

    slim: bool
    draft_length: int


class CascadePlanner:
    """Plans the passes of one sequence.

    A round pays if it emits more tokens per cost than the best way to begin one in the same situation does on average:
    that is the round's *reference*, R. In the middle of a round a further slim pass is worth its expected tokens less R
    times its cost (a ratio of two sums is maximised by this difference, Dinkelbach 1967), and the round ends when the
    full pass is worth more.

    Args:
        costs: of passes, and what is expected of slim.
        acceptance: probability that a drafted token is kept, by the situation it is drafted in (`Drafter.expectation`).
    """

    def __init__(self, costs: CostModel, acceptance: Callable[[int], float]) -> None:
        self._costs = costs
        self._beside: tuple[Beside, Beside] | None = None
        self._set_costs(ALONE, ALONE)
        self._per_pending = costs.full.per_token
        self._draft_cost = costs.draft
        self._acceptance = acceptance
        self.agreement = SlimAgreement(costs.agreement)
        self._pending: list[int] = []  # margin classes
        self._survival = 1.0  # probability that full keeps every pending token
        self._expected = 0.0  # expected number of pending tokens that full keeps
        self._reference = 1.0
        self._mean = self.agreement.mean()  # with what was known when the round began

    def _set_costs(self, full: Beside, slim: Beside) -> None:
        """Set what passes cost that are shared like this."""
        if (full, slim) == self._beside:
            return
        self._beside = (full, slim)
        longest = _MOST_PENDING + _HORIZON + _SLIM_DRAFTS[-1] + _FULL_DRAFT + 2
        self._full = self._costs.full.shared(full, longest)
        drafting = self._costs.draft
        shared = self._costs.slim.shared(slim, _SLIM_DRAFTS[-1] + 1)
        self._slim = [0.0, *(cost + length * drafting for length, cost in enumerate(shared[1:]))]

    def begin(self, situation: int, full: Beside = ALONE, slim: Beside = ALONE) -> None:
        """Begin a round in a drafter's `situation`; nothing is pending.

        Args:
            full, slim: who shares the passes of the tier.
        """
        self._set_costs(full, slim)
        self._pending.clear()
        self._survival, self._expected = 1.0, 0.0
        self._mean = self.agreement.mean()
        self._reference = self._best_rate(situation)

    def choose(self, situation: int, room: int) -> Pass:
        """The next pass.

        Args:
            situation: the drafter's, behind the pending tokens; 0 where it has nothing to propose.
            room: drafted tokens that may follow the pending ones.
        """
        length, worth = self._full_draft(situation, room)
        stop = 1 + self._expected - self._reference * self._full[len(self._pending) + 1]
        if not self._pending:
            stop += worth
        # With tokens pending, the draft behind them is left out of the comparison: it is there after a slim pass, too.
        best, best_worth = 0, -math.inf
        if room >= 1 and len(self._pending) < _MOST_PENDING:
            for drafted in _SLIM_DRAFTS:
                if drafted and (situation == 0 or drafted >= room):
                    break
                worth = self._slim_worth(situation, drafted)
                if worth > best_worth:
                    best, best_worth = drafted, worth
        return Pass(True, best) if best_worth > stop else Pass(False, length)

    def wrote(self, margins: Sequence[float]) -> None:
        """A slim pass added tokens that it wrote or accepted, with slim's margin at each."""
        for margin in margins:
            index = self.agreement.classify(margin)
            self.agreement.wrote(index)
            self._pending.append(index)
            self._survival *= self.agreement.rate(index)
            self._expected += self._survival

    def judged(self, kept: int) -> None:
        """The full pass kept the first `kept` of the pending tokens, and judged no more than one beyond."""
        for position, index in enumerate(self._pending[: kept + 1]):
            self.agreement.judged(index, position < kept)

    def _full_draft(self, situation: int, room: int) -> tuple[int, float]:
        """Length of the draft behind the pending tokens that is worth most to a full pass, and its worth."""
        best, best_worth = 0, 0.0
        if situation == 0:
            return best, best_worth
        pending = len(self._pending) + 1
        survival, expected = self._survival, 0.0
        for length in range(1, min(_FULL_DRAFT, room) + 1):
            survival *= self._acceptance(situation + length - 1)
            expected += survival
            cost = self._full[pending + length] - self._full[pending] + length * self._draft_cost
            worth = expected - self._reference * cost
            if worth > best_worth:
                best, best_worth = length, worth
            elif survival < 0.05:
                break
        return best, best_worth

    def _slim_worth(self, situation: int, drafted: int) -> float:
        """What the round is worth with a slim pass over `drafted` tokens next, and then as many over one as pay.

        What margins will tell is left out, but where a round begins with a token of slim's own: the reference may be
        what slim brings that stops at the first unsure token, and a round must be worth what its reference promises.
        """
        mean, reference = self._mean, self._reference
        added, kept, last = self._slim_tokens(situation, drafted)
        expected, last, cost = self._expected + self._survival * kept, self._survival * last, self._slim[drafted + 1]
        further, step = 0, reference * (self._slim[1] + self._per_pending)
        while further < _HORIZON and last * mean > step:
            last *= mean
            expected += last
            cost += self._slim[1]
            further += 1
        worth = 1 + expected - reference * (cost + self._full[round(len(self._pending) + 1 + added + further)])
        if not self._pending and not drafted:
            tokens, cost = self._until_unsure()
            worth = max(worth, tokens - reference * cost)
        return worth

    def _slim_tokens(self, situation: int, drafted: int) -> tuple[float, float, float]:
        """Of a slim pass: tokens it adds, those of them that full keeps, probability that full keeps the last."""
        mean = self._mean
        added, kept, survival, power = 1.0, mean, 1.0, mean
        for index in range(drafted):
            survival *= self._acceptance(situation + index)
            power *= mean
            added += survival
            kept += survival * power
        return added, kept, mean**added

    def _best_rate(self, situation: int) -> float:
        """Most tokens per cost that a way to go through a whole round is expected to bring in this situation."""
        best = 1 / self._full[1]
        if situation:
            survival = expected = 1.0
            for length in range(1, _FULL_DRAFT + 1):
                survival *= self._acceptance(situation + length - 1)
                expected += survival
                best = max(best, expected / (self._full[length + 1] + length * self._draft_cost))
        for drafted in _SLIM_DRAFTS if situation else _SLIM_DRAFTS[:1]:
            added, kept, last = self._slim_tokens(situation, drafted)
            expected, cost = 1 + kept, self._slim[drafted + 1]
            previous = 0.0
            for further in range(_HORIZON):
                rate = expected / (cost + self._full[round(added + further + 1)])
                if rate < previous:  # from here on it falls
                    break
                best, previous = max(best, rate), rate
                last *= self._mean
                expected += last
                cost += self._slim[1]
        tokens, cost = self._until_unsure()
        return max(best, tokens / cost)

    def _until_unsure(self) -> tuple[float, float]:
        """Tokens and cost of a round in which slim writes up to the first token of the lowest margins."""
        agreement = self.agreement
        shares = agreement.shares()
        sure = sum(share * agreement.rate(index) for index, share in enumerate(shares) if index) / sum(shares[1:])
        length = max(1, round(min(1 / shares[0], _HORIZON)))
        survival, expected = 1.0, 1.0
        for _ in range(length - 1):
            survival *= sure
            expected += survival
        expected += survival * agreement.rate(0)
        return expected, length * self._slim[1] + self._full[length + 1]
