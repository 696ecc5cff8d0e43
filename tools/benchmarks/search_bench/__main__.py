"""How well and how fast the mask search finds what it should: the tables in docs/search.md.

    python -m tools.benchmarks.search_bench SMOLLM2_DIRECTORY --prompts FILE --work DIRECTORY [--tables …] [--seconds N]

Makes two planted verifiers from the checkpoint (stand-ins for models large enough to have layers to spare), searches
them and the checkpoint itself with several methods, objectives and seeds, and prints tables. Everything evaluated is
kept in the work directory: a run that was interrupted, or ended by --seconds, is continued by the same command.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.table import Table

from tools.benchmarks.planted import MASK_FILE, evenly, plant, scattered
from tools.benchmarks.search_bench.cache import EvaluationCache, OutOfTimeError
from tools.benchmarks.search_bench.cost import measure_cost
from via_sd.masks import OBJECTIVES, Mask, SearchResult, Space, improvements, read_mask, search
from via_sd.tools.bench.prompts import read_prompts
from via_sd.tools.commands.console import CommandError, command, err, out
from via_sd.tools.commands.options import Threads

ITERATIONS = 200
#: Share of the planted layers that counts as found.
FOUND = 0.9

#: What differs from the default search, by method; all of them have the same number of evaluations.
METHODS: Mapping[str, Mapping[str, Any]] = {
    "search": {},
    "search, no refinement": {"refine": False},
    "random": {"refine": False, "theta": ITERATIONS + 1},
}


@dataclass(frozen=True)
class Problem:
    """A model to search at a skip ratio; `planted` is its best mask, if that is known."""

    name: str
    cache: EvaluationCache
    skip_ratio: float
    planted: Mask | None = None

    def run(self, method: str, seed: int, objective: str = "via") -> SearchResult:
        """Search with a method of `METHODS`."""
        evaluator = self.cache.under(objective)
        options = METHODS[method]
        return search(evaluator, skip_ratio=self.skip_ratio, iterations=ITERATIONS, seed=seed, **options)

    def evenly_spaced(self) -> Mask:
        """The mask one takes without a search."""
        space = Space.of(self.cache.num_layers, self.skip_ratio, "layer")
        return space.mask(space.evenly_spaced())

    def hits(self, mask: Mask) -> float:
        """Share of the planted layers that `mask` skips."""
        assert self.planted is not None
        kept = [keep for keep, real in zip(mask.keep_mlp, self.planted.keep_mlp, strict=True) if not real]
        return kept.count(False) / len(kept)

    def found(self, mask: Mask) -> bool:
        """Whether `mask` skips nearly all planted layers."""
        return self.hits(mask) >= FOUND


def evaluations_to(result: SearchResult, wanted: Callable[[Mask], bool]) -> int | None:
    """After how many evaluations the best mask so far was a `wanted` one; None if it never was."""
    best = improvements(result.records, result.space)
    return next((number for number, record in best if wanted(result.space.mask(record.selection))), None)


@command
def main(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face directory of SmolLM2-135M.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines; the models' answers to them are scored.")],
    work: Annotated[Path, typer.Option(help="Where planted models and evaluations are kept.")],
    tables: Annotated[str, typer.Option(help="Which of objectives, planted, methods, cost.")] = (
        "objectives,planted,methods,cost"
    ),
    seeds: Annotated[int, typer.Option(help="Searches of each kind.")] = 5,
    window: Annotated[int, typer.Option(help="Tokens that are scored; the cost is always measured over 1000.")] = 300,
    seconds: Annotated[float | None, typer.Option(help="Evaluate no longer than this; run again to go on.")] = None,
    threads: Threads = None,
) -> None:
    """Print the tables of docs/search.md."""
    chosen = tables.split(",")
    if unknown := sorted(set(chosen) - set(_TABLES) - {"cost"}):
        raise CommandError(f"no table is called {', '.join(unknown)}; tables are {', '.join([*_TABLES, 'cost'])}")
    texts = [prompt.text for prompt in read_prompts(prompts)]
    deadline = time.monotonic() + (float("inf") if seconds is None else seconds)

    def cache(model: Path) -> EvaluationCache:
        return EvaluationCache(model, work / "evaluations", texts, window, deadline=deadline, threads=threads)

    try:
        problems = [
            *_planted_problems(checkpoint, work, cache),
            Problem("SmolLM2-135M, 10 %", cache(checkpoint), 0.1),
        ]
        for name in chosen:
            if name == "cost":
                out.print(
                    measure_cost(checkpoint, texts, work, iterations=ITERATIONS, deadline=deadline, threads=threads)
                )
            else:
                out.print(_TABLES[name](problems, range(seeds)))
    except OutOfTimeError:
        done = f"stopped after {seconds:g} seconds" if seconds is not None else "stopped"
        err.print(f"{done}: the same command goes on from here", highlight=False)
        raise typer.Exit(3) from None


def _planted_problems(checkpoint: Path, work: Path, cache: Callable[[Path], EvaluationCache]) -> Iterator[Problem]:
    """The two planted verifiers of a 30-layer checkpoint: evenly placed copies, and scattered ones."""
    placements = (
        ("planted-55", "55 layers, 25 planted (epsilon 0.1)", evenly(30, 3, 27), 0.1),
        ("planted-40", "40 layers, 10 planted, scattered (epsilon 0.05)", scattered(30, 10, seed=7), 0.05),
    )
    for directory, name, copies, epsilon in placements:
        target = work / directory
        if not target.exists():
            plant(checkpoint, target, copies, epsilon=epsilon)
        planted = read_mask(target / MASK_FILE)
        yield Problem(name, cache(target), sum(copies) / len(planted.keep_mlp), planted)


def _objectives(problems: Sequence[Problem], seeds: Sequence[int]) -> Table:
    table = _table("objectives, on planted verifiers (medians over seeds)", "planted verifier", "objective", "method")
    for heading in ("planted layers found", f"evaluations to {FOUND:.0%}", "KL of the mask", "same top-1"):
        table.add_column(heading, justify="right")
    for problem in _with_planted(problems):
        for method in ("search", "search, no refinement"):
            for objective in OBJECTIVES:
                results = [problem.run(method, seed, objective) for seed in seeds]
                entries = [problem.cache.entry(result.mask) for result in results]
                table.add_row(
                    problem.name,
                    objective,
                    method,
                    f"{median(problem.hits(result.mask) for result in results):.0%}",
                    _evaluations([evaluations_to(result, problem.found) for result in results]),
                    f"{median(entry.costs['kl'] for entry in entries):.4f}",
                    f"{median(entry.agreement for entry in entries):.1%}",
                )
    return table


def _planted(problems: Sequence[Problem], seeds: Sequence[int]) -> Table:
    table = _table("default search, on planted verifiers", "planted verifier", "seed")
    for heading in ("planted layers found", "cost", "cost of the planted mask", "evaluations to that cost"):
        table.add_column(heading, justify="right")
    for problem in _with_planted(problems):
        assert problem.planted is not None
        known = problem.cache.under("via").evaluate(problem.planted).cost
        for seed in seeds:
            result = problem.run("search", seed)
            reached = next(
                (i for i, r in enumerate(result.records, 1) if r.kind != "probe" and r.cost <= 1.02 * known), None
            )
            table.add_row(
                problem.name,
                f"{seed}",
                f"{problem.hits(result.mask):.0%}",
                f"{result.cost:.5f}",
                f"{known:.5f}",
                _evaluations([reached]),
            )
    return table


def _methods(problems: Sequence[Problem], seeds: Sequence[int]) -> Table:
    table = _table(f"cost (same top-1) after {ITERATIONS} evaluations", "model", "method")
    for seed in seeds:
        table.add_column(f"seed {seed}", justify="right")
    for problem in problems:
        for method in METHODS:
            results = [problem.run(method, seed) for seed in seeds]
            table.add_row(problem.name, method, *(f"{r.cost:.4f} ({r.agreement:.0%})" for r in results))
        entry = problem.cache.entry(problem.evenly_spaced())
        table.add_row(problem.name, "evenly spaced", f"{entry.costs['via']:.4f} ({entry.agreement:.0%})")
    return table


_TABLES: Mapping[str, Callable[[Sequence[Problem], Sequence[int]], Table]] = {
    "objectives": _objectives,
    "planted": _planted,
    "methods": _methods,
}


def _with_planted(problems: Sequence[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.planted is not None]


def _table(title: str, *texts: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in texts:
        table.add_column(heading)
    return table


def _evaluations(counts: Sequence[int | None]) -> str:
    """Their median, where a search that did not get there counts as longer than any that did."""
    ordered = sorted(float("inf") if count is None else count for count in counts)
    middle = ordered[len(ordered) // 2]
    return "not reached" if middle == float("inf") else f"{middle:g}"


if __name__ == "__main__":
    typer.run(main)
