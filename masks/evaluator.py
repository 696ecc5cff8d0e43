"""The seam between the search and a model: an evaluator says what a mask costs.

`search` knows only `Evaluator`. `DistributionEvaluator` makes one of anything that turns a mask into logits
(`MaskedModel`), whatever engine that runs on: it runs the full model once, keeps its distributions compactly, and
compares every candidate with them block by block, so that memory does not grow with the vocabulary times the text.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from via_sd.masks.distributions import CompactDistributions, log_softmax
from via_sd.masks.mask import Mask
from via_sd.masks.objective import Objective


@dataclass(frozen=True)
class Evaluation:
    """What an evaluator says of a mask: mean cost per position (nats), and the share of positions at which the
    slim-verifier's likeliest token is the full verifier's.
    """

    cost: float
    agreement: float


class Evaluator(Protocol):
    """Costs of masks, all measured on the same text against the same model."""

    @property
    def num_layers(self) -> int:
        """Layers of the model; masks have as many."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What the costs depend on (model, text, objective, …), as JSON data: costs of different identity do not
        compare.
        """

    def evaluate(self, mask: Mask) -> Evaluation:
        """The cost of `mask`; the same mask always gives the same cost."""


class MaskedModel(Protocol):
    """A model that runs under any mask over a calibration text of its own: mask in, distributions out."""

    @property
    def num_layers(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_positions(self) -> int:
        """Positions of the text that are scored."""

    def logits(self, mask: Mask) -> Iterator[NDArray[np.float32]]:
        """Logits of the scored positions in order, in blocks [rows, vocab]; a block is valid until the next one."""


class DistributionEvaluator:
    """An `Evaluator` over a `MaskedModel`.

    Args:
        model: what runs under the masks.
        objective: cost of each position, see `masks.objective`.
        identity: what the costs depend on.
        threads: threads that compare distributions; one per processor if None.
        full: the full model's distributions, if another evaluator has them already.
    """

    def __init__(
        self,
        model: MaskedModel,
        objective: Objective,
        identity: Mapping[str, Any],
        *,
        threads: int | None = None,
        full: CompactDistributions | None = None,
    ) -> None:
        self.model = model
        self.objective = objective
        self.identity: Mapping[str, Any] = dict(identity)
        self.num_layers = model.num_layers
        self._threads = ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="evaluator")
        self._parts = threads or os.cpu_count() or 1
        #: log q of every position.
        everything = Mask.from_layers([True] * model.num_layers)
        self.full = self.distributions(everything) if full is None else full

    def distributions(self, mask: Mask) -> CompactDistributions:
        """The distributions of every position under `mask`, kept compactly."""
        kept = CompactDistributions(self.model.num_positions, self.model.vocab_size)

        def store(start: int, logits: NDArray[np.float32]) -> None:
            kept.store(start, log_softmax(logits))

        for start, block in self._blocks(mask):
            list(self._threads.map(store, *self._split(start, block)))
        return kept

    def evaluate(self, mask: Mask) -> Evaluation:
        (cost,), agreement = self.score(mask, [self.objective])
        return Evaluation(cost, agreement)

    def score(self, mask: Mask, objectives: Sequence[Objective]) -> tuple[list[float], float]:
        """Mean cost per position under each of `objectives`, and top-1 agreement, from one run under `mask`."""
        costs = np.zeros((len(objectives), self.model.num_positions))
        agree = np.zeros(self.model.num_positions, bool)

        def compare(start: int, logits: NDArray[np.float32]) -> None:
            rows = slice(start, start + len(logits))
            agree[rows] = logits.argmax(-1) == self.full.best[rows]
            log_slim = log_softmax(logits)
            log_full = self.full.log_probs(start, start + len(logits))
            for index, objective in enumerate(objectives):
                costs[index, rows] = objective(log_full, log_slim)

        for start, block in self._blocks(mask):
            list(self._threads.map(compare, *self._split(start, block)))
        return costs.mean(1).tolist(), float(agree.mean())

    def _blocks(self, mask: Mask) -> Iterator[tuple[int, NDArray[np.float32]]]:
        start = 0
        for block in self.model.logits(mask):
            yield start, block
            start += len(block)
        if start != self.model.num_positions:
            raise RuntimeError(f"the model gave logits of {start} positions, wanted {self.model.num_positions}")

    def _split(self, start: int, block: NDArray[np.float32]) -> tuple[list[int], list[NDArray[np.float32]]]:
        """The block in pieces that fit a core's cache, each with the position it starts at."""
        step = max(1, min(_PIECE // block.shape[1], -(-len(block) // self._parts)))
        starts = range(0, len(block), step)
        return [start + i for i in starts], [block[i : i + step] for i in starts]


#: Logits that one thread compares at a time.
_PIECE = 1 << 18
