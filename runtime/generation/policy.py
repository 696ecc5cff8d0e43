"""What `calibrate` found for a bundle on a machine: forward pass latency there, and how `auto` decodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from via_sd.contract.mode_names import CALIBRATED, EXACT_MODES, MODES
from via_sd.runtime.decoding.router import RouterMargins


@dataclass(frozen=True)
class Policy:
    """A calibration's result.

    Attributes:
        auto: the fastest mode, with fields of `GenerationConfig` that go with it where a request leaves them open.
        exact: the fastest exact mode, which `auto` means where `auto` would not be within a request's wishes.
        full_cost: time of a full pass over S tokens, in passes over one, by S.
        slim_cost: time of a slim pass over S tokens, in full passes over one, by S; None without a slim-verifier.
        draft_cost: of one drafted token, in full passes over one; None for a drafter that runs no model.
        router: None where no divergence was allowed.
    """

    auto: Mapping[str, Any]
    exact: str
    full_cost: Mapping[int, float]
    slim_cost: Mapping[int, float] | None = None
    draft_cost: float | None = None
    router: RouterMargins | None = None

    def __post_init__(self) -> None:
        if self.auto["mode"] not in MODES or self.exact not in EXACT_MODES:
            raise ValueError(f"modes {self.auto['mode']!r} and {self.exact!r}")
        if self.auto.get("router") == CALIBRATED and self.router is None:
            raise ValueError("auto uses a calibrated router, but the policy has no margins")
        curves = [curve for curve in (self.full_cost, self.slim_cost) if curve is not None]
        costs = [
            *(cost for curve in curves for cost in curve.values()),
            1.0 if self.draft_cost is None else self.draft_cost,
        ]
        if any(1 not in curve or len(curve) < 2 for curve in curves):
            raise ValueError("costs without that of one token, or of one token alone")
        if not all(0 < cost < float("inf") for cost in costs):
            raise ValueError("costs that are not positive and finite")

    def options_for(self, max_divergence: float | None, *, as_measured: bool) -> Mapping[str, Any]:
        """What `auto` means for a request: the measured mode, unless it is approximate and the request is not
        `as_measured` (greedy, without a penalty) or allows less divergence than was allowed.
        """
        limit = self.auto.get("max_divergence")
        fits = as_measured and (max_divergence is None or (limit is not None and limit <= max_divergence))
        return self.auto if self.auto["mode"] in EXACT_MODES or fits else {"mode": self.exact}
