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
    QUANTISED_STATES,
    SEARCHED_STATES,
    DistributionEvaluator,
    Granularity,
    Mask,
    Masks,
    Record,
    SearchResult,
    Space,
    StateSpace,
    StepCosts,
    recorded_settings,
    search,
    search_within,
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
from via_sd.tools.search.timing import measure_step_costs

_VERSIONS_OF = ("via-sd-export", "numpy", "onnxruntime", "optuna")


@dataclass(frozen=True)
class SearchOptions:
    """How masks are proposed, scored and measured.

    Attributes:
        granularity, iterations, theta, refine, seed: see `masks.search`; theta and refine are of the search by skip
            ratio.
        states: of sublayers, for the search within a cost, see `masks.search_within`.
        objective, alpha, beta: how far a mask is from full, see `objective_by_name`; the Delta criterion takes alpha
            and beta. The objective is `via` if it is None, and `kl` within a cost: `via` is zero for differences as
            small as those of quantised weights.
        window: tokens that are scored.
        drafter: the drafter of the Delta criterion: `ngram`, `mask:FILE`, or a model with the verifier's vocabulary.
        max_lag: tokens that slim may run ahead of full where its second agreement is measured.
        threads: threads of one forward pass; ONNX Runtime's default if None.
    """

    granularity: Granularity = "layer"
    states: tuple[str, ...] = SEARCHED_STATES
    objective: str | None = None
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
    """What a search found at one skip ratio, or within one cost.

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
    skip_ratios: Sequence[float] = (),
    *,
    costs: Sequence[float] = (),
    step_costs: StepCosts | None = None,
    prompts: Sequence[str] = (),
    text: Path | None = None,
    options: SearchOptions | None = None,
    states: Sequence[Path] | None = None,
    resume: bool = False,
    progress: Progress = no_progress,
) -> Iterator[FoundMask]:
    """Search the mask of `verifier` that is nearest to full at each skip ratio, or within each cost; the verifier is
    loaded at once, masks come when they are found.

    Args:
        verifier: Hugging Face directory, hub id, GGUF file, ONNX decoder or bundle.
        skip_ratios: shares of the layers to skip, each 0 to 1; one of 0.45 if there are no costs either.
        costs: shares of full's decoding step that a mask may take, each 0 to 1.
        step_costs: what states cost, such as `recorded_costs` of a mask found elsewhere; measured if None.
        prompts: the verifier's greedy answers to these are scored, or
        text: this UTF-8 file is.
        options: defaults if None.
        states: a file per skip ratio or cost that keeps every evaluation, to resume a search from; none if None.
        resume: go on with the searches in `states`.
        progress: called with what is being done and the share of it that is done, None where that is unknown.

    Raises:
        SearchError: an option outside its domain, no text to score, or a verifier or drafter that cannot be used.
        MaskError: a file in `states` holds another search, or an unfinished one and no `resume`.
    """
    options = options or SearchOptions()
    if skip_ratios and costs:
        raise SearchError("wanted either skip ratios or costs, found both")
    asked = skip_ratios or costs or (DEFAULT_SKIP_RATIO,)
    counts = {name: getattr(options, name) for name in ("iterations", "theta", "window", "max_lag")}
    if min(counts.values()) < 1:
        found = ", ".join(f"{name} {count}" for name, count in counts.items() if count < 1)
        raise SearchError(f"iterations, theta, window and max_lag must be 1 or more, found {found}")
    if bool(prompts) == (text is not None):
        raise SearchError("wanted the text to score: give either prompts or text")
    progress("loading the verifier", None)
    precisions = [state for state in QUANTISED_STATES if costs and state in options.states]
    model = load_search_model(verifier, precisions=precisions, threads=options.threads)
    paths: Sequence[Path | None] = states if states is not None else [None] * len(asked)
    # What does not fit the verifier is refused before masks are searched for what is asked in front of it.
    plans: list[Space | StateSpace]
    if costs:
        plans = _spaces_within(model, costs, step_costs, options, paths if resume else [None] * len(costs), progress)
    else:
        plans = [_space(model, ratio, options.granularity) for ratio in asked]
    if text is None:
        texts = greedy_texts(model, prompts, options.window, progress)
    else:
        texts = file_text(model, text, options.window)
    progress("running the full model", None)
    objective = options.objective or ("kl" if costs else DEFAULT_OBJECTIVE)
    run = _Search(model, texts, replace(options, objective=objective), "greedy answers" if text is None else "file")
    return (
        run.within(space, path, resume, progress)
        if isinstance(space, StateSpace)
        else run.at(ratio, space, path, resume, progress)
        for ratio, space, path in zip(asked, plans, paths, strict=True)
    )


class _Search:
    """Searches of one verifier on one text."""

    def __init__(self, model: SearchModel, texts: Sequence[ScoringText], options: SearchOptions, source: str) -> None:
        self._model = model
        self._options = options
        self._evaluator: DistributionEvaluator = open_evaluator(
            model,
            texts,
            objective=options.objective or DEFAULT_OBJECTIVE,
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

    def at(self, ratio: float, space: Space, state: Path | None, resume: bool, progress: Progress) -> FoundMask:
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
            progress=_Reporter(progress, f"skip {ratio:g}", options.iterations, space),
        )
        progress(f"measuring the mask for skip ratio {ratio:g}", None)
        return self._measured(ratio, result)

    def within(self, space: StateSpace, state: Path | None, resume: bool, progress: Progress) -> FoundMask:
        """Search within one cost, and measure the mask."""
        options = self._options
        try:
            result = search_within(
                self._evaluator,
                space.limit,
                space.costs,
                states=space.states,
                granularity=options.granularity,
                iterations=options.iterations,
                seed=options.seed,
                state=state,
                resume=resume,
                progress=_Reporter(progress, f"cost {space.limit:g}", options.iterations, space),
            )
        except ValueError as error:
            raise SearchError(str(error)) from None
        progress(f"measuring the mask within cost {space.limit:g}", None)
        return self._measured(space.limit, result)

    def _measured(self, asked: float, result: SearchResult) -> FoundMask:
        point = self._measure.point(asked, result)
        return FoundMask(replace(point, mask=_described(self._model, result, point, self._facts)), result)


class _Reporter:
    """Reports how far a search is, and how far from full the best complete mask so far is."""

    def __init__(self, progress: Progress, what: str, iterations: int, space: Masks) -> None:
        self._progress = progress
        self._what = what
        self._iterations = iterations
        self._space = space
        self._done = 0
        self._best: Record | None = None

    def __call__(self, record: Record) -> None:
        self._done += 1
        if self._space.is_complete(record.selection) and (self._best is None or record.cost < self._best.cost):
            self._best = record
        best = f", best cost {self._best.cost:.4g}" if self._best else ""
        self._progress(f"{self._what}: {self._done}/{self._iterations} masks{best}", self._done / self._iterations)


def _space(model: SearchModel, ratio: float, granularity: Granularity) -> Space:
    try:
        return Space.of(model.model.num_layers, ratio, granularity)
    except ValueError as error:
        raise SearchError(str(error)) from None


def _spaces_within(
    model: SearchModel,
    costs: Sequence[float],
    given: StepCosts | None,
    options: SearchOptions,
    recorded: Sequence[Path | None],
    progress: Progress,
) -> list[StateSpace | Space]:
    """The space within each of `costs`: with the costs of states that a search in `recorded` began with, so that it
    can go on, or those that are given, or as they are measured now.
    """
    measured = given
    spaces: list[StateSpace | Space] = []
    for cost, path in zip(costs, recorded, strict=True):
        found = recorded_settings(path).get("step_costs") if path is not None else None
        if found is None and measured is None:
            progress("measuring what states cost", None)
            measured = measure_step_costs(model)
        try:
            step_costs = measured if found is None else StepCosts.from_json(found)
            assert step_costs is not None
            spaces.append(StateSpace.of(model.model.num_layers, options.granularity, options.states, step_costs, cost))
        except (KeyError, TypeError):
            raise SearchError(f"{path} has costs of states that cannot be read; delete it") from None
        except ValueError as error:
            raise SearchError(str(error)) from None
    return spaces


def recorded_costs(mask: Mask) -> StepCosts:
    """What states cost where the search within a cost that found `mask` ran.

    Raises:
        SearchError: no such search found it.
    """
    try:
        return StepCosts.from_json(mask.search["step_costs"])
    except (KeyError, TypeError, ValueError):
        raise SearchError(
            f"mask '{mask.name}' does not say what states cost; wanted one that search --cost found"
        ) from None


def _described(model: SearchModel, result: SearchResult, point: FrontPoint, facts: Mapping[str, Any]) -> Mask:
    """The mask found, made for `model`, with how it was found and its figures."""
    found = dict(result.mask.search)
    identity = found.pop("costs_of")
    del identity["model"]
    return replace(result.mask, model=model.model, search={**found, **identity, **facts, **point.to_json()})
