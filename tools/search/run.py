"""From a verifier to masks: score each candidate on a text, and measure what every mask found buys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from via_sd.errors import SearchError
from via_sd.masks import (
    DEFAULT_ALPHA,
    DEFAULT_BETA,
    DEFAULT_OBJECTIVE,
    DistributionEvaluator,
    Granularity,
    Mask,
    Record,
    SearchResult,
    Space,
    search,
)
from via_sd.masks.search import DEFAULT_ITERATIONS, DEFAULT_SKIP_RATIO, DEFAULT_THETA
from via_sd.progress import Progress, no_progress
from via_sd.tools.search.evaluator import (
    SearchModel,
    file_text,
    greedy_texts,
    load_search_model,
    open_evaluator,
)
from via_sd.tools.search.front import FrontPoint, Measurements, drafter_distributions
from via_sd.tools.search.text import DEFAULT_WINDOW, ScoringText

_VERSIONS_OF = ("via-sd-export", "numpy", "onnxruntime", "optuna")


@dataclass(frozen=True)
class SearchOptions:
    """How masks are proposed, scored and measured.

    Attributes:
        granularity, iterations, theta, refine, seed: see `masks.search`.
        objective, alpha, beta: what a mask costs, see `objective_by_name`; the Delta criterion takes alpha and beta.
        window: tokens that are scored.
        drafter: the drafter of the Delta criterion: `ngram`, `mask:FILE`, or a model with the verifier's vocabulary.
        max_lag: tokens that slim may run ahead of full where its second agreement is measured.
        threads: threads of one forward pass; ONNX Runtime's default if None.
    """

    granularity: Granularity = "layer"
    objective: str = DEFAULT_OBJECTIVE
    alpha: float = DEFAULT_ALPHA
    beta: float = DEFAULT_BETA
    iterations: int = DEFAULT_ITERATIONS
    theta: int = DEFAULT_THETA
    refine: bool = True
    window: int = DEFAULT_WINDOW
    seed: int = 0
    drafter: str = "ngram"
    max_lag: int = 64
    threads: int | None = None


@dataclass(frozen=True)
class FoundMask:
    """What a search found at one skip ratio.

    Attributes:
        point: the mask, made for its verifier and with all figures in its `search` entry, and the figures themselves.
        result: every evaluation of the search.
    """

    point: FrontPoint
    result: SearchResult

    @property
    def mask(self) -> Mask:
        return self.point.mask


def search_masks(
    verifier: str | Path,
    skip_ratios: Sequence[float] = (DEFAULT_SKIP_RATIO,),
    *,
    prompts: Sequence[str] = (),
    text: Path | None = None,
    options: SearchOptions | None = None,
    states: Sequence[Path] | None = None,
    resume: bool = False,
    progress: Progress = no_progress,
) -> Iterator[FoundMask]:
    """Search the cheapest mask of `verifier` at each skip ratio; the verifier is loaded at once, masks come when found.

    Args:
        verifier: Hugging Face directory, hub id, GGUF file, ONNX decoder or bundle.
        skip_ratios: shares of the layers to skip, each 0 to 1.
        prompts: the verifier's greedy answers to these are scored, or
        text: this UTF-8 file is.
        options: defaults if None.
        states: a file per skip ratio that keeps every evaluation, so that a search can be resumed; none if None.
        resume: go on with the searches in `states`.
        progress: called with what is being done and the share of it that is done, None where that is unknown.

    Raises:
        SearchError: an option outside its domain, no text to score, or a verifier or drafter that cannot be used.
        MaskError: a file in `states` holds another search, or an unfinished one and no `resume`.
    """
    options = options or SearchOptions()
    counts = {name: getattr(options, name) for name in ("iterations", "theta", "window", "max_lag")}
    if min(counts.values()) < 1:
        found = ", ".join(f"{name} {count}" for name, count in counts.items() if count < 1)
        raise SearchError(f"iterations, theta, window and max_lag must be 1 or more, found {found}")
    if bool(prompts) == (text is not None):
        raise SearchError("wanted the text to score: give either prompts or text")
    progress("loading the verifier", None)
    model = load_search_model(verifier, threads=options.threads)
    # A ratio that does not fit the verifier is refused before masks are searched for those in front of it.
    spaces = [_space(model, ratio, options.granularity) for ratio in skip_ratios]
    if text is None:
        texts = greedy_texts(model, prompts, options.window, progress)
    else:
        texts = file_text(model, text, options.window)
    progress("running the full model", None)
    run = _Search(model, texts, options, "greedy answers" if text is None else "file")
    paths = states if states is not None else [None] * len(skip_ratios)
    return (
        run.at(ratio, space.budget, path, resume, progress)
        for ratio, space, path in zip(skip_ratios, spaces, paths, strict=True)
    )


class _Search:
    """Searches of one verifier on one text."""

    def __init__(self, model: SearchModel, texts: Sequence[ScoringText], options: SearchOptions, source: str) -> None:
        self._model = model
        self._options = options
        self._evaluator: DistributionEvaluator = open_evaluator(
            model,
            texts,
            objective=options.objective,
            alpha=options.alpha,
            beta=options.beta,
            threads=options.threads,
        )
        self._measure = Measurements(
            self._evaluator,
            model,
            drafter_distributions(options.drafter, model, self._evaluator, texts, options.threads),
            max_lag=options.max_lag,
            alpha=options.alpha,
            beta=options.beta,
        )
        self._facts = {
            "text": {"from": source, "window": options.window},
            "drafter": options.drafter,
            "versions": {name: version(name) for name in _VERSIONS_OF},
        }

    def at(self, ratio: float, budget: int, state: Path | None, resume: bool, progress: Progress) -> FoundMask:
        """Search at one skip ratio, and measure the mask."""
        options = self._options
        result = search(
            self._evaluator,
            skip_ratio=ratio,
            granularity=options.granularity,
            iterations=options.iterations,
            theta=options.theta,
            refine=options.refine,
            seed=options.seed,
            state=state,
            resume=resume,
            progress=_Reporter(progress, ratio, options.iterations, budget),
        )
        progress(f"measuring the mask for skip ratio {ratio:g}", None)
        point = self._measure.point(ratio, result)
        return FoundMask(replace(point, mask=_described(self._model, result, point, self._facts)), result)


class _Reporter:
    """Reports how far a search is, and the best cost so far of a mask that skips all it should."""

    def __init__(self, progress: Progress, ratio: float, iterations: int, budget: int) -> None:
        self._progress = progress
        self._ratio = ratio
        self._iterations = iterations
        self._budget = budget
        self._done = 0
        self._best: Record | None = None

    def __call__(self, record: Record) -> None:
        self._done += 1
        if len(record.skipped) == self._budget and (self._best is None or record.cost < self._best.cost):
            self._best = record
        best = f", best cost {self._best.cost:.4g}" if self._best else ""
        self._progress(
            f"skip {self._ratio:g}: {self._done}/{self._iterations} masks{best}", self._done / self._iterations
        )


def _space(model: SearchModel, ratio: float, granularity: Granularity) -> Space:
    try:
        return Space.of(model.model.num_layers, ratio, granularity)
    except ValueError as error:
        raise SearchError(str(error)) from None


def _described(model: SearchModel, result: SearchResult, point: FrontPoint, facts: Mapping[str, Any]) -> Mask:
    """The mask found, made for `model`, with how it was found and its figures."""
    found = dict(result.mask.search)
    identity = found.pop("costs_of")
    del identity["model"]
    return replace(result.mask, model=model.model, search={**found, **identity, **facts, **point.to_json()})
