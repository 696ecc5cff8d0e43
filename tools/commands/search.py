"""`via-sd-export search`: verifier -> masks, with what each buys."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from via_sd.masks import (
    DEFAULT_ALPHA,
    DEFAULT_BETA,
    DEFAULT_OBJECTIVE,
    Mask,
    Record,
    SearchResult,
    Space,
    refuse_unfinished,
    write_mask,
)
from via_sd.masks import search as search_masks
from via_sd.tools.bench.prompts import read_prompts
from via_sd.tools.commands.console import CommandError, command, err, out, print_json, progress_bar
from via_sd.tools.commands.options import AsJson, Threads
from via_sd.tools.search.evaluator import (
    Progress,
    SearchModel,
    file_text,
    greedy_texts,
    load_search_model,
    open_evaluator,
)
from via_sd.tools.search.front import FrontPoint, Measurements, drafter_distributions
from via_sd.tools.search.plots import plot_front, plot_search, pyplot
from via_sd.tools.search.text import DEFAULT_WINDOW

_VERSIONS_OF = ("via-sd-export", "numpy", "onnxruntime", "optuna")


class Granularity(str, Enum):
    """What is skipped whole."""

    layer = "layer"
    sublayer = "sublayer"


class Objective(str, Enum):
    """What a mask costs."""

    via = "via"
    via_flipped = "via-flipped"
    kl = "kl"


_OBJECTIVE = Objective(DEFAULT_OBJECTIVE)


@command
def search(
    verifier: Annotated[str, typer.Argument(help="Hugging Face directory, hub id, GGUF file, ONNX decoder or bundle.")],
    out_file: Annotated[
        Path, typer.Option("--out", help="Mask file to write; several skip ratios make several: NAME-RATIO.json.")
    ],
    prompts: Annotated[
        Path | None, typer.Option(help='JSON lines, {"prompt": …}: the verifier\'s greedy answers are scored.')
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Score this text file instead of the verifier's answers.")] = None,
    skip_ratio: Annotated[str, typer.Option(metavar="X[,X…]", help="Share of the layers to skip.")] = "0.45",
    granularity: Annotated[Granularity, typer.Option(help="What is skipped whole.")] = Granularity.layer,
    objective: Annotated[Objective, typer.Option(help="What a mask costs.")] = _OBJECTIVE,
    alpha: Annotated[float, typer.Option(help="Of the objective: 0 <= alpha < 1.")] = DEFAULT_ALPHA,
    beta: Annotated[float, typer.Option(help="Of the objective: 0 < beta <= 1.")] = DEFAULT_BETA,
    iterations: Annotated[int, typer.Option(help="Masks to evaluate for each skip ratio.")] = 200,
    theta: Annotated[int, typer.Option(help="Every so many iterations Bayesian optimisation proposes the mask.")] = 5,
    refine: Annotated[
        bool, typer.Option("--refine/--no-refine", help="Refine by swaps; without, the paper's search alone.")
    ] = True,
    window: Annotated[int, typer.Option(help="Calibration window tau: tokens that are scored.")] = DEFAULT_WINDOW,
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
    drafter: Annotated[
        str, typer.Option(help="For the Delta criterion: `ngram`, `mask:FILE`, or a model with the vocabulary.")
    ] = "ngram",
    max_lag: Annotated[int, typer.Option(help="Tokens slim may run ahead of full; see the second agreement.")] = 64,
    threads: Threads = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a search that was interrupted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Search the layers that VERIFIER can best do without; write masks, plots, and what each mask buys."""
    ratios = _ratios(skip_ratio)
    files = [_mask_file(out_file, ratio if len(ratios) > 1 else None) for ratio in ratios]
    if min(iterations, theta, window, max_lag) < 1:
        raise CommandError("--iterations, --theta, --window and --max-lag must be 1 or more")
    if (prompts is None) == (text is None):
        raise CommandError("wanted the text to score: give either --prompts or --text")
    wanted = [prompt.text for prompt in read_prompts(prompts)] if prompts else []
    if not resume:
        for file in files:
            refuse_unfinished(_beside(file, ".search.jsonl"))
            if file.exists():
                raise CommandError(f"{file} exists; choose another --out, or delete it")
    pyplot()  # rather now than when the search is done
    points: list[FrontPoint] = []
    with progress_bar() as progress:
        progress("loading the verifier", None)
        model = load_search_model(verifier, threads=threads)
        spaces = [_space(model, ratio, granularity) for ratio in ratios]
        texts = file_text(model, text, window) if text else greedy_texts(model, wanted, window, progress)
        progress("running the full model", None)
        evaluator = open_evaluator(model, texts, objective=objective.value, alpha=alpha, beta=beta, threads=threads)
        laws = drafter_distributions(drafter, model, evaluator, texts, threads)
        measure = Measurements(evaluator, model, laws, max_lag=max_lag, alpha=alpha, beta=beta)
        for ratio, space, file in zip(ratios, spaces, files, strict=True):
            state = _beside(file, ".search.jsonl")
            try:
                result = search_masks(
                    evaluator,
                    skip_ratio=ratio,
                    granularity=granularity.value,
                    iterations=iterations,
                    theta=theta,
                    refine=refine,
                    seed=seed,
                    state=state,
                    resume=resume,
                    progress=_Reporter(progress, ratio, iterations, space.budget),
                )
            except KeyboardInterrupt:
                err.print(f"{state} keeps what was evaluated: the same command with --resume goes on", highlight=False)
                raise
            progress(f"measuring the mask for skip ratio {ratio:g}", None)
            point = measure.point(ratio, result)
            facts = {
                "text": {"from": "file" if text else "greedy answers", "window": window},
                "drafter": drafter,
                "versions": {name: version(name) for name in _VERSIONS_OF},
            }
            mask = _described(model, result, point, facts)
            write_mask(mask, file)
            plot_search(result.records, space.budget, mask, _beside(file, ".png"))
            points.append(replace(point, mask=replace(mask, name=file.stem)))
    if len(points) > 1:
        plot_front(points, _beside(out_file, "-front.png"))
    if as_json:
        found = [
            {"path": str(f), "skip_ratio": p.skip_ratio, **p.mask.search} for f, p in zip(files, points, strict=True)
        ]
        print_json({"masks": found})
        return
    _show(points, drafter)
    for file in files:
        err.print(f"wrote {file}", highlight=False)


class _Reporter:
    """Shows how far a search is and the best cost so far."""

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


def _ratios(text: str) -> list[float]:
    try:
        ratios = [float(part) for part in text.split(",")]
    except ValueError:
        raise CommandError(f"--skip-ratio is {text!r}, wanted numbers between 0 and 1: X[,X…]") from None
    if len(set(ratios)) != len(ratios):
        raise CommandError(f"--skip-ratio {text} names a ratio twice")
    return ratios


def _mask_file(path: Path, ratio: float | None) -> Path:
    return path if ratio is None else _beside(path, f"-{ratio:g}.json")


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name.removesuffix(".json") + ending)


def _space(model: SearchModel, ratio: float, granularity: Granularity) -> Space:
    try:
        return Space.of(model.model.num_layers, ratio, granularity.value)
    except ValueError as error:
        raise CommandError(str(error)) from None


def _described(model: SearchModel, result: SearchResult, point: FrontPoint, facts: dict[str, Any]) -> Mask:
    """The mask, made for `model`, with everything that is to know of how it was found."""
    search = dict(result.mask.search)
    identity = search.pop("costs_of")
    del identity["model"]
    return replace(result.mask, model=model.model, search={**search, **identity, **facts, **point.to_json()})


def _show(points: list[FrontPoint], drafter: str) -> None:
    table = Table(title="what each mask buys", title_justify="left")
    lag = points[0].max_lag
    for name in ("skip ratio", "cost", "KL", "same top-1", f"at lag {lag}", "step time/full", f"Delta ({drafter})"):
        table.add_column(name, justify="right")
    for point in points:
        table.add_row(
            f"{point.skip_ratio:g}",
            f"{point.cost:.4g}",
            f"{point.kl:.4g}",
            f"{point.agreement:.1%}",
            f"{point.lagging.agreement:.1%}",
            f"{point.step_ratio:.2f}",
            "no proposal" if point.delta is None else f"{point.delta.value:+.4g}",
        )
    out.print(table)
    out.print(
        "costs, KL and Delta in nats per token; Delta > 0: between this drafter and full, the mask is worth a tier",
        style="dim",
        highlight=False,
    )
