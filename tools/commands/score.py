"""`via-sd-export score`: perplexity of every tier on a user's texts, and how far slim and routed are off full."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from via_sd.contract.mode_names import PLAIN, ROUTED
from via_sd.runtime import GenerationConfig, Pipeline
from via_sd.tools.commands.console import CommandError, command, out, print_json
from via_sd.tools.commands.options import AsJson, PipelineOptions, with_pipeline_options
from via_sd.tools.evaluation.divergence import measure_divergence


@command
@with_pipeline_options
def score(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.")],
    texts: Annotated[Path, typer.Option(help='A text file, or JSON lines with a "text" each (.jsonl).')],
    runtime: PipelineOptions,
    window: Annotated[
        int | None,
        typer.Option(help="Tokens that are scored together.", show_default="all that fit", min=2),
    ] = None,
    router: Annotated[str | None, typer.Option(help="Router of routed: paper or calibrated.")] = None,
    alpha2: Annotated[float | None, typer.Option(help="Threshold of routed, see `generate`.")] = None,
    max_divergence: Annotated[float | None, typer.Option(help="With --router calibrated, see `generate`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score TEXTS under every tier of BUNDLE: perplexity, KL divergence from full, share of equal likeliest tokens."""
    given = list(_read(texts))
    pipeline = runtime.load(bundle)
    limit = min(window or pipeline.capacity, pipeline.capacity)
    mode = PLAIN if pipeline.bundle.slim is None else ROUTED
    config = GenerationConfig(mode=mode, router=router, alpha2=alpha2, max_divergence=max_divergence)
    gate = pipeline.router(pipeline.resolve(config))
    found = measure_divergence(pipeline, (part for text in given for part in _windows(pipeline, text, limit)), gate)
    if not found.figures:
        raise CommandError(f"{texts} has no text of two tokens or more; give one that has")
    if as_json:
        print_json(found.to_json())
        return
    out.print(_table(found.to_json()))


def _read(file: Path) -> Iterator[str]:
    try:
        content = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read texts {file}: {error}") from None
    if file.suffix != ".jsonl":
        yield content
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CommandError(f"{file}, line {number} is not JSON: {error}") from None
        if not isinstance(data, dict) or not isinstance(data.get("text"), str):
            raise CommandError(f'{file}, line {number}: wanted {{"text": "…"}}, found {line[:60]}')
        yield data["text"]


def _windows(pipeline: Pipeline, text: str, limit: int) -> Iterator[list[int]]:
    """The tokens of `text` in windows: the last token of one is the first of the next, so that each is scored once."""
    tokens = list(pipeline.tokenizer.encode(text).ids)
    for at in range(0, len(tokens) - 1, limit - 1):
        yield tokens[at : at + limit]


def _table(figures: dict[str, dict[str, Any]]) -> Table:
    tokens = next(iter(figures.values()))["tokens"]
    table = Table(title=f"{tokens} tokens", title_justify="left")
    for column in ("tier", "perplexity", "KL from full (nats)", "same likeliest token", "tokens from slim"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for name, each in figures.items():
        table.add_row(
            name,
            f"{each['perplexity']:.3f}",
            f"{each['kl']:.4f}",
            f"{each['same_argmax']:.1%}",
            f"{each['from_slim']:.1%}",
        )
    return table
