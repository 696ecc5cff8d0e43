"""What a search costs: its time, piece by piece, and its peak memory."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from tools.benchmarks.search_bench.cache import OutOfTimeError, stored_texts
from via_sd.masks import Record, search
from via_sd.tools.search.evaluator import greedy_texts, load_search_model, open_evaluator
from via_sd.tools.search.masked_text import MaskedText

WINDOW = 1000


def measure_cost(
    checkpoint: Path,
    prompts: Sequence[str],
    work: Path,
    iterations: int,
    *,
    deadline: float,
    threads: int | None,
) -> Table:
    """Run the default search over 1,000 scored tokens, and say how long it took and how much memory.

    The search may be ended by the deadline and gone on with in another process; what counts are the longest start
    (building the search graph, loading, answering the prompts, running the full model) and the sum of all evaluations.

    Raises:
        OutOfTimeError: the deadline (of `time.monotonic()`) passed before the last evaluation.
    """
    state, pieces_file = work / "cost.search.jsonl", work / "cost.json"
    pieces = json.loads(pieces_file.read_text(encoding="utf-8")) if pieces_file.exists() else []
    if sum(piece["evaluations"] for piece in pieces) < iterations:
        began = time.monotonic()
        model = load_search_model(checkpoint, threads=threads)
        loaded = time.monotonic()
        texts = stored_texts(work / "cost-text.json", lambda: greedy_texts(model, prompts, WINDOW))
        answered = time.monotonic()
        evaluator = open_evaluator(model, texts, threads=threads)
        masked = evaluator.model
        assert isinstance(masked, MaskedText)
        ready = time.monotonic()
        old = sum(piece["evaluations"] for piece in pieces)
        marks: list[float] = []

        def progress(_: Record) -> None:
            marks.append(time.monotonic())
            if len(marks) > old and marks[-1] > deadline:
                raise OutOfTimeError

        try:
            search(evaluator, iterations=iterations, state=state, resume=True, progress=progress)
        finally:
            # Those that an earlier piece made were only read.
            started = marks[old - 1] if old else ready
            pieces.append(
                {
                    "evaluations": len(marks) - old,
                    "evaluating_s": marks[-1] - started,
                    "load_s": loaded - began,
                    "text_s": answered - loaded,
                    "full_s": ready - answered,
                    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
                    "peak_building_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3,
                    "weights_mb": model.weight_bytes / 1e6,
                    "sublayers_asked": masked.sublayers_asked,
                    "sublayers_run": masked.sublayers_run,
                }
            )
            pieces_file.write_text(json.dumps(pieces, indent=1) + "\n", encoding="utf-8")
    evaluating = sum(piece["evaluating_s"] for piece in pieces)
    load, text, full = (max(piece[key] for piece in pieces) for key in ("load_s", "text_s", "full_s"))
    weights = pieces[0]["weights_mb"]
    table = Table(title=f"{iterations} evaluations over {WINDOW} tokens", title_justify="left", show_header=False)
    table.add_row("build the search graph, load", f"{load:.1f} s")
    table.add_row("scoring text (greedy answers)", f"{text:.1f} s")
    table.add_row("full model's distributions", f"{full:.1f} s")
    table.add_row("evaluations", f"{evaluating:.1f} s ({1e3 * evaluating / iterations:.0f} ms each)")
    run, asked = (sum(piece[key] for piece in pieces) for key in ("sublayers_run", "sublayers_asked"))
    table.add_row("sublayer runs shared with the full model or earlier candidates", f"{1 - run / asked:.0%}")
    table.add_row("all", f"{load + text + full + evaluating:.0f} s")
    for key, what in (("peak_mb", "searching"), ("peak_building_mb", "building the graph")):
        peak = max(piece[key] for piece in pieces)
        table.add_row(f"peak memory, {what}", f"{peak:.0f} MB, {peak / weights:.2f}x the weights ({weights:.0f} MB)")
    return table
