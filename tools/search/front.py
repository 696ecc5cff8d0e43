"""What a mask buys and costs: the figures a search reports of each mask it found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from via_sd.errors import SearchError
from via_sd.masks import (
    CompactDistributions,
    Delta,
    DistributionEvaluator,
    Evaluation,
    LookupDistributions,
    Mask,
    SearchResult,
    StateSpace,
    delta_criterion,
    forward_kl,
    objective_by_name,
    read_mask,
)
from via_sd.runtime.decoding.drafters.ngram import NgramDrafter
from via_sd.tools.search.evaluator import SearchModel, load_search_model, open_evaluator
from via_sd.tools.search.masked_text import MaskedText
from via_sd.tools.search.text import ScoringText
from via_sd.tools.search.timing import StepTimes, step_times

Drafter = LookupDistributions | CompactDistributions


@dataclass(frozen=True)
class FrontPoint:
    """A mask and its figures; costs in nats per position.

    Attributes:
        asked: what was asked for: the share of the layers that is skipped, or
        within_cost: if this is true, the most that a step may take of a step of full.
        mask: the mask.
        cost, agreement: of the slim-verifier that reads its own KV of all scored tokens, see `Evaluation`.
        kl: KL(full || slim) in that regime.
        lagging: the same mask where slim reads full's KV up to `max_lag` tokens back.
        max_lag: that many tokens.
        step_ms: what a step takes.
        delta: the Delta criterion for the drafter, None where the drafter proposes nothing.
    """

    asked: float
    within_cost: bool
    mask: Mask
    cost: float
    agreement: float
    kl: float
    lagging: Evaluation
    max_lag: int
    step_ms: StepTimes
    delta: Delta | None

    @property
    def step_ratio(self) -> float:
        """Step time under the mask over the full model's."""
        return self.step_ms.slim / self.step_ms.full

    def to_json(self) -> dict[str, Any]:
        """The figures, as a mask file keeps them."""
        return {
            "cost": self.cost,
            "agreement": self.agreement,
            "kl": self.kl,
            "regime": {
                "kv": "own",
                "max_lag": self.max_lag,
                "cost_at_max_lag": self.lagging.cost,
                "agreement_at_max_lag": self.lagging.agreement,
            },
            "step_ms": asdict(self.step_ms),
            "delta": self.delta and self.delta.to_json(),
        }


class Measurements:
    """Measures masks on one text.

    Args:
        evaluator: over a `MaskedText` of `model`.
        model: the verifier.
        drafter: the drafter's distributions at the scored positions.
        max_lag: see `FrontPoint`.
        alpha, beta: of the Delta criterion, which is stated in the paper's objective whatever the search minimises.
    """

    def __init__(
        self,
        evaluator: DistributionEvaluator,
        model: SearchModel,
        drafter: Drafter,
        *,
        max_lag: int,
        alpha: float,
        beta: float,
    ) -> None:
        assert isinstance(evaluator.model, MaskedText)
        self._evaluator = evaluator
        self._model = model
        self._drafter = drafter
        self._max_lag = max_lag
        self._via = objective_by_name("via", alpha=alpha, beta=beta)
        lagging = evaluator.model.lagging(max_lag)
        self._lagging = DistributionEvaluator(lagging, evaluator.objective, {}, full=evaluator.full)

    def point(self, asked: float, result: SearchResult) -> FrontPoint:
        """The figures of what a search found."""
        mask = result.mask
        (kl,), _ = self._evaluator.score(mask, [forward_kl])
        return FrontPoint(
            asked=asked,
            within_cost=isinstance(result.space, StateSpace),
            mask=mask,
            cost=result.cost,
            agreement=result.agreement,
            kl=kl,
            lagging=self._lagging.evaluate(mask),
            max_lag=self._max_lag,
            step_ms=step_times(self._model, mask),
            delta=self._delta(mask),
        )

    def _delta(self, mask: Mask) -> Delta | None:
        positions = self._drafter.proposed if isinstance(self._drafter, LookupDistributions) else None
        if positions is not None and not positions.any():
            return None
        slim = self._evaluator.distributions(mask)
        return delta_criterion(self._evaluator.full, slim, self._drafter, self._via, positions=positions)


def drafter_distributions(
    drafter: str,
    model: SearchModel,
    evaluator: DistributionEvaluator,
    texts: Sequence[ScoringText],
    threads: int | None,
) -> Drafter:
    """What a drafter would propose at every scored position.

    Args:
        drafter: `ngram`, `mask:FILE`, or a model (path or hub id) with the verifier's vocabulary.

    Raises:
        SearchError, MaskError: no such drafter, or one that does not fit the verifier.
    """
    if drafter == "ngram":
        return _lookup(texts, model.session.vocab_size)
    if drafter.startswith("mask:"):
        mask = read_mask(drafter.removeprefix("mask:"), num_layers=evaluator.num_layers)
        mask.check_model(model.model)
        return evaluator.distributions(mask)
    other = load_search_model(drafter, threads=threads)
    if other.session.vocab_size != model.session.vocab_size:
        raise SearchError(
            f"drafter {drafter} has {other.session.vocab_size} tokens, the verifier {model.session.vocab_size}; "
            "wanted a drafter with the verifier's vocabulary"
        )
    return open_evaluator(other, texts, objective="kl", threads=threads).full


def _lookup(texts: Sequence[ScoringText], vocab_size: int) -> LookupDistributions:
    proposals: list[int] = []
    for text in texts:
        lookup = NgramDrafter()
        for end in range(text.start + 1, len(text.tokens) + 1):
            proposals += lookup.lookup(text.tokens[:end], 1).tokens or [-1]
    return LookupDistributions(np.array(proposals, np.int64), vocab_size)
