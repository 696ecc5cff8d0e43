"""Evaluations of masks kept on disk, so that searches with other seeds, methods and objectives share them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from via_sd.files import write_whole
from via_sd.masks import OBJECTIVES, DistributionEvaluator, Evaluation, Mask, objective_by_name
from via_sd.tools.search.evaluator import greedy_texts, load_search_model, open_evaluator
from via_sd.tools.search.text import ScoringText


class OutOfTimeError(Exception):
    """The time for new evaluations is over; those made are on disk."""


@dataclass(frozen=True)
class MaskCosts:
    """Cost of a mask by objective, in nats per position, and top-1 agreement."""

    costs: dict[str, float]
    agreement: float


class EvaluationCache:
    """Costs of masks of one model on one text under every objective (at its default parameters).

    The model is loaded when a mask is asked for that is not on disk. The files are plain JSON: one with the text,
    one with a line for each mask.

    Args:
        model: Hugging Face directory.
        directory: where the files are kept.
        prompts: the text is the model's greedy answers to these,
        window: this many tokens of them.
        deadline: `time.monotonic()` from which on no mask is evaluated any more.
        threads: of one pass.
    """

    def __init__(
        self,
        model: Path,
        directory: Path,
        prompts: Sequence[str],
        window: int,
        *,
        deadline: float = float("inf"),
        threads: int | None = None,
    ) -> None:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        self.num_layers = int(config["num_hidden_layers"])
        self._model = model
        self._prompts = prompts
        self._window = window
        self._deadline = deadline
        self._threads = threads
        self._evaluator: DistributionEvaluator | None = None
        self._text_file = directory / f"{model.name}-{window}-text.json"
        self._file = directory / f"{model.name}-{window}-evaluations.jsonl"
        self._known: dict[int, MaskCosts] = {}
        directory.mkdir(parents=True, exist_ok=True)
        if self._file.exists():
            *lines, cut_off = self._file.read_text(encoding="utf-8").split("\n")
            if cut_off:  # by a kill
                write_whole(self._file, "".join(f"{line}\n" for line in lines))
            for entry in map(json.loads, lines):
                self._known[int(entry["keep"], 16)] = MaskCosts(entry["costs"], entry["agreement"])

    def entry(self, mask: Mask) -> MaskCosts:
        """Costs by objective, and agreement.

        Raises:
            OutOfTimeError: the mask is new and the deadline has passed.
        """
        keep = _keep_bits(mask)
        if keep not in self._known:
            if time.monotonic() > self._deadline:
                raise OutOfTimeError
            functions = [objective_by_name(name) for name in OBJECTIVES]
            costs, agreement = self._opened().score(mask, functions)
            entry = MaskCosts(dict(zip(OBJECTIVES, costs, strict=True)), agreement)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"keep": f"{keep:x}", "costs": entry.costs, "agreement": agreement}) + "\n")
            self._known[keep] = entry
        return self._known[keep]

    def under(self, objective: str) -> CachedEvaluator:
        """An evaluator that minimises `objective`."""
        return CachedEvaluator(self, objective)

    def _opened(self) -> DistributionEvaluator:
        if self._evaluator is None:
            model = load_search_model(self._model, threads=self._threads)
            texts = stored_texts(self._text_file, lambda: greedy_texts(model, self._prompts, self._window))
            self._evaluator = open_evaluator(model, texts, threads=self._threads)
        return self._evaluator


def _keep_bits(mask: Mask) -> int:
    """The sublayers that run: bit i is set where sublayer i does."""
    return sum(1 << index for index, flag in enumerate(mask.sublayers) if flag)


def stored_texts(file: Path, make: Callable[[], list[ScoringText]]) -> list[ScoringText]:
    """The texts in `file`, made and written there if there is none."""
    if not file.exists():
        data = [{"tokens": text.tokens, "start": text.start} for text in make()]
        write_whole(file, json.dumps(data) + "\n")
    stored = json.loads(file.read_text(encoding="utf-8"))
    return [ScoringText(tuple(text["tokens"]), text["start"]) for text in stored]


class CachedEvaluator:
    """A `masks.Evaluator` over an `EvaluationCache`."""

    def __init__(self, cache: EvaluationCache, objective: str) -> None:
        self._cache = cache
        self._objective = objective
        self.num_layers = cache.num_layers
        self.identity: Mapping[str, Any] = {"objective": objective}

    def evaluate(self, mask: Mask) -> Evaluation:
        entry = self._cache.entry(mask)
        return Evaluation(entry.costs[self._objective], entry.agreement)
