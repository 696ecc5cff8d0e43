"""The confidence router: what becomes of a drafted token after a slim pass (paper Algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol

from via_sd.contract.generation_options import ALPHA1, ALPHA2, OPTIONS, GenerationConfig
from via_sd.contract.mode_names import PAPER
from via_sd.runtime.decoding.running_ratio import RunningRatio
from via_sd.runtime.engines.rows import Row


class Route(Enum):
    """ACCEPT the draft token, REGENERATE it with slim's own, or ESCALATE to the full verifier."""

    ACCEPT = "accept"
    REGENERATE = "regenerate"
    ESCALATE = "escalate"


class Router(Protocol):
    """Decides from slim's rows alone. `tightening`, 1 and less, asks for more certainty the smaller it is."""

    @property
    def shut(self) -> bool:
        """Whether slim can never accept a token alone, so that it need not run."""
        ...

    def route(self, row: Row, token: int, tightening: float = 1.0) -> Route:
        """Decide for the drafted `token` after slim's `row`."""
        ...

    def is_sure(self, row: Row, tightening: float = 1.0) -> bool:
        """Whether slim's own token may stand where nothing was drafted."""
        ...


@dataclass(frozen=True)
class Gates:
    """The paper's two thresholds, on slim's untruncated probabilities at temperature 1.

    Outer gate, slim is sure of itself: max q' >= 1 - alpha2, else ESCALATE. Inner gate, the draft token is nearly
    slim's best: q'(v) >= (1 - alpha1) max q', then ACCEPT, else REGENERATE. The paper states the outer gate against
    max q, which is only known after the pass it is meant to save; here it uses slim's own confidence.
    """

    alpha1: float = ALPHA1
    alpha2: float = ALPHA2
    shut: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("alpha1", "alpha2"):
            OPTIONS[name].check(getattr(self, name))

    @classmethod
    def of(cls, config: GenerationConfig) -> Gates:
        """The gates with the thresholds of a request, the paper's where it leaves them open."""
        return cls(
            ALPHA1 if config.alpha1 is None else config.alpha1, ALPHA2 if config.alpha2 is None else config.alpha2
        )

    def route(self, row: Row, token: int, tightening: float = 1.0) -> Route:
        """Decide for `token` after slim's `row`; `tightening` scales both thresholds."""
        if not self.is_sure(row, tightening):
            return Route.ESCALATE
        # q'(v) / max q' needs no normalisation.
        relative = math.exp(row.gap(token))
        return Route.ACCEPT if relative >= 1 - self.alpha1 * tightening else Route.REGENERATE

    def is_sure(self, row: Row, tightening: float = 1.0) -> bool:
        """The outer gate: slim's likeliest token has at least probability 1 - alpha2."""
        return row.sum_exp() * (1 - self.alpha2 * tightening) <= 1.0


@dataclass(frozen=True)
class MarginGate:
    """What slim likes best stands where it leads by at least `margin`; else ESCALATE.

    The margin, slim's largest logit less its second, tells better than its probability whether the full verifier would
    choose the same, and nothing else that is known before full is asked adds to it: see docs/router.md.
    """

    margin: float

    @property
    def shut(self) -> bool:
        """See `Router.shut`."""
        return self.margin == math.inf

    def route(self, row: Row, token: int, tightening: float = 1.0) -> Route:
        """See `Router.route`."""
        if not self.is_sure(row, tightening):
            return Route.ESCALATE
        return Route.ACCEPT if token == row.argmax() else Route.REGENERATE

    def is_sure(self, row: Row, tightening: float = 1.0) -> bool:
        """See `Router.is_sure`; a margin grows by 1 when `tightening` halves."""
        return row.margin() >= self.margin - math.log2(tightening)


@dataclass(frozen=True)
class RouterMargins:
    """What calibration found out about slim's margins.

    Attributes:
        max_divergence: the limit it was calibrated for.
        margins: share of tokens that may differ from the full verifier's choice -> the least margin that kept to it.
    """

    max_divergence: float
    margins: Mapping[float, float]

    def __post_init__(self) -> None:
        shares = (self.max_divergence, *self.margins)
        if not all(0 <= share <= 1 for share in shares) or not all(map(math.isfinite, self.margins.values())):
            raise ValueError("a router has a share outside 0 to 1, or a margin that is not finite")

    def gate(self, max_divergence: float) -> MarginGate:
        """The gate for the largest share measured that is within `max_divergence`; shut where there is none."""
        within = [share for share in self.margins if share <= max_divergence]
        return MarginGate(self.margins[max(within)] if within else math.inf)


class DivergenceGuard:
    """Tightens the gates of one sequence when its audit finds more divergence than the user allows, and loosens again.

    Counted are roughly the last `memory` audited tokens. A few disagreements are no evidence: at a limit of 2 % chance
    brings one in 30 tokens. More than the limit explains are those beyond its expectation by a standard deviation and
    a half token. Each block that finds so many halves `tightening`; each other doubles it, up to 1.
    """

    def __init__(self, limit: float | None, memory: int = 512) -> None:
        self._limit = OPTIONS["max_divergence"].check(limit)
        self._divergence = RunningRatio(1 - 1 / memory)
        self.tightening = 1.0

    def audited(self, disagreements: list[float]) -> None:
        """Take the audit of one full pass: for each token how far full disagreed, 0 to 1."""
        if self._limit is None or not disagreements:
            return
        for value in disagreements:
            self._divergence.add(value)
        expected = self._limit * self._divergence.units
        too_many = self._divergence.value * self._divergence.units > expected + math.sqrt(expected) + 0.5
        self.tightening = self.tightening / 2 if too_many else min(1.0, self.tightening * 2)
        if self.tightening < 1 / 64:
            self.tightening = 1 / 64


@dataclass(frozen=True)
class Routing:
    """What mode `routed` decides by.

    Attributes:
        router: judges slim's rows.
        guard: tightens it by what the audit finds.
        slim_always_first: begin every round with a slim pass, as the paper does; else only where that pays.
        max_lag: most emitted tokens that the full verifier has not checked yet.
        audit_tail: end with a full pass over the tokens that the slim-verifier accepted alone.
        keep_margins: note in the counters how slim's margins fared.
    """

    router: Router
    guard: DivergenceGuard
    slim_always_first: bool
    max_lag: int
    audit_tail: bool
    keep_margins: bool

    @classmethod
    def of(cls, config: GenerationConfig, router: Router) -> Routing:
        """As `config` asks, with its `router`."""
        guard = DivergenceGuard(config.max_divergence)
        first = config.router == PAPER
        return cls(router, guard, first, config.max_lag, config.audit_tail, config.keep_margins)
