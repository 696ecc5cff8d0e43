"""`via-sd-export search`: verifier -> masks, with what each buys."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from via_sd.masks import read_mask, refuse_unfinished, write_mask
from via_sd.tools.bench import read_prompts
from via_sd.tools.commands.console import CommandError, command, err, out, print_json, progress_bar
from via_sd.tools.commands.options import AsJson, Threads
from via_sd.tools.plotting import pyplot
from via_sd.tools.search import FoundMask, SearchOptions, plot_front, plot_search, recorded_costs, search_masks

_DEFAULTS = SearchOptions()


class Granularity(StrEnum):
    """What changes its state whole."""

    layer = "layer"
    sublayer = "sublayer"


class Objective(StrEnum):
    """How far a mask is from full."""

    via = "via"
    via_flipped = "via-flipped"
    kl = "kl"


_GRANULARITY = Granularity(_DEFAULTS.granularity)


@command
def search(
    verifier: Annotated[str, typer.Argument(help="Hugging Face directory, hub id, GGUF file, ONNX decoder or bundle.")],
    out_file: Annotated[
        Path, typer.Option("--out", help="Mask file to write; several ratios or costs make several: NAME-RATIO.json.")
    ],
    prompts: Annotated[
        Path | None, typer.Option(help='JSON lines, {"prompt": …}: the verifier\'s greedy answers are scored.')
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Score this text file instead of the verifier's answers.")] = None,
    skip_ratio: Annotated[
        str | None, typer.Option(metavar="X[,X…]", help="Share of the layers to skip.", show_default="0.45")
    ] = None,
    cost: Annotated[
        str | None,
        typer.Option(
            metavar="X[,X…]",
            help="Instead: most that a decoding step may take, as a share of full's step, by whatever states.",
        ),
    ] = None,
    states: Annotated[
        str, typer.Option(metavar="STATE,…", help="With --cost: what the mask may do with a layer.")
    ] = ",".join(_DEFAULTS.states),
    costs_of: Annotated[
        Path | None,
        typer.Option(help="With --cost: a mask found on the machine it is for; states cost what they cost there."),
    ] = None,
    granularity: Annotated[Granularity, typer.Option(help="What changes its state whole.")] = _GRANULARITY,
    objective: Annotated[
        Objective | None,
        typer.Option(help="How far a mask is from full.", show_default="via; with --cost: kl"),
    ] = None,
    alpha: Annotated[float, typer.Option(help="Of the objective: 0 <= alpha < 1.")] = _DEFAULTS.alpha,
    beta: Annotated[float, typer.Option(help="Of the objective: 0 < beta <= 1.")] = _DEFAULTS.beta,
    iterations: Annotated[int, typer.Option(help="Masks to evaluate for each ratio or cost.")] = _DEFAULTS.iterations,
    theta: Annotated[
        int, typer.Option(help="Every so many iterations Bayesian optimisation proposes the mask.")
    ] = _DEFAULTS.theta,
    refine: Annotated[
        bool, typer.Option("--refine/--no-refine", help="Refine by swaps; without, the paper's search alone.")
    ] = _DEFAULTS.refine,
    window: Annotated[int, typer.Option(help="Tokens that are scored: the paper's tau.")] = _DEFAULTS.window,
    seed: Annotated[int, typer.Option(help="Random seed.")] = _DEFAULTS.seed,
    drafter: Annotated[
        str, typer.Option(help="For the Delta criterion: `ngram`, `mask:FILE`, or a model with the vocabulary.")
    ] = _DEFAULTS.drafter,
    max_lag: Annotated[
        int, typer.Option(help="Tokens slim may run ahead of full where its second agreement is measured.")
    ] = _DEFAULTS.max_lag,
    threads: Threads = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a search that was interrupted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Search the layers that VERIFIER can best do without, or run in fewer bits; write masks, plots, and what each
    mask buys.
    """
    if skip_ratio is not None and cost is not None:
        raise CommandError("wanted one of --skip-ratio and --cost, found both")
    ratios = _shares("--skip-ratio", skip_ratio or "0.45") if cost is None else _shares("--cost", cost)
    files = _mask_files(out_file, ratios)
    if (prompts is None) == (text is None):
        raise CommandError("wanted the text to score: give either --prompts or --text")
    wanted = [prompt.text for prompt in read_prompts(prompts)] if prompts else []
    if not resume:
        _refuse_existing(files)
    pyplot()  # a missing matplotlib is reported now rather than when the search is done
    options = SearchOptions(
        granularity=granularity.value,
        states=tuple(part.strip() for part in states.split(",")),
        objective=objective and objective.value,
        alpha=alpha,
        beta=beta,
        iterations=iterations,
        theta=theta,
        refine=refine,
        window=window,
        seed=seed,
        drafter=drafter,
        max_lag=max_lag,
        threads=threads,
    )
    found: list[FoundMask] = []
    with progress_bar() as progress:
        masks = search_masks(
            verifier,
            ratios if cost is None else (),
            costs=() if cost is None else ratios,
            step_costs=None if costs_of is None else recorded_costs(read_mask(costs_of)),
            prompts=wanted,
            text=text,
            options=options,
            states=[_state_file(file) for file in files],
            resume=resume,
            progress=progress,
        )
        for file in files:
            try:
                found.append(next(masks))
            except KeyboardInterrupt:
                kept = f"{_state_file(file)} keeps what was evaluated: the same command with --resume continues"
                err.print(kept, highlight=False)
                raise
            _write(found[-1], file)
    if len(found) > 1:
        plot_front([each.point for each in found], _beside(out_file, "-front.png"))
    if as_json:
        print_json({"masks": [_facts(each, file) for each, file in zip(found, files, strict=True)]})
        return
    _show(found, drafter)
    for file in files:
        err.print(f"wrote {file}", highlight=False)


def _shares(option: str, text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        raise CommandError(f"{option} is {text!r}, wanted numbers between 0 and 1: X[,X…]") from None
    if len(set(shares)) != len(shares):
        raise CommandError(f"{option} {text} names a number twice")
    return shares


def _mask_files(path: Path, ratios: Sequence[float]) -> list[Path]:
    """The mask file of each ratio."""
    return [path] if len(ratios) == 1 else [_beside(path, f"-{ratio:g}.json") for ratio in ratios]


def _state_file(mask_file: Path) -> Path:
    """Where the evaluations of the search for a mask are kept."""
    return _beside(mask_file, ".search.jsonl")


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name.removesuffix(".json") + ending)


def _refuse_existing(files: Sequence[Path]) -> None:
    for file in files:
        refuse_unfinished(_state_file(file))
        if file.exists():
            raise CommandError(f"{file} exists; choose another --out, or delete it")


def _write(found: FoundMask, file: Path) -> None:
    write_mask(found.mask, file)
    plot_search(found.result, _beside(file, ".png"))


def _facts(found: FoundMask, file: Path) -> dict[str, object]:
    return {"path": str(file), **found.mask.search}


def _show(found: Sequence[FoundMask], drafter: str) -> None:
    table = Table(title="what each mask buys", title_justify="left")
    lag = found[0].point.max_lag
    asked = "step asked for" if found[0].point.within_cost else "skip ratio"
    for name in (asked, "cost", "KL", "same top-1", f"at lag {lag}", "step time/full", f"Delta ({drafter})"):
        table.add_column(name, justify="right")
    for point in (each.point for each in found):
        table.add_row(
            f"{point.asked:g}",
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
