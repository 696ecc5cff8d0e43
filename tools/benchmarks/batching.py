"""Total speed of several requests at once over one at a time, for every mode, and how long streams wait for a newcomer.

    python -m tools.benchmarks.batching BUNDLE --prompts PROMPTS

One process; modes and numbers of clients take turns, and ratios are of the medians of the same run. Each client asks
the next of the prompts given, so one client is asked for as many texts as the largest number of clients.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.table import Table

from via_sd.contract.mode_names import PLAIN
from via_sd.runtime import Completion, Pipeline
from via_sd.tools.bench.prompts import read_prompts
from via_sd.tools.commands.console import command, out, print_json
from via_sd.tools.commands.options import Threads


@dataclass
class Measured:
    """Runs of one mode with one number of clients.

    Attributes:
        speeds: tokens per second of all clients together.
        host: share of the time outside the engines.
        sequences: in a forward pass, on average.
        different: texts that were not those of one client, of the last run.
    """

    speeds: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    sequences: list[float] = field(default_factory=list)
    different: int = 0

    def to_json(self) -> dict[str, Any]:
        """Medians."""
        return {
            "tokens_per_s": statistics.median(self.speeds),
            "host_share": statistics.median(self.host),
            "sequences_per_pass": statistics.median(self.sequences),
            "different_texts": self.different,
        }


@command
def main(
    bundle: Annotated[Path, typer.Argument(help="Bundle.", metavar="<path>")],
    prompts: Annotated[Path, typer.Option(help="JSON lines with prompts, one for each client.", metavar="<path>")],
    modes: Annotated[str, typer.Option(help="Modes, separated by commas.", metavar="<str>")] = "plain,speculative",
    clients: Annotated[str, typer.Option(help="Numbers of clients beside one.", metavar="<int,…>")] = "4,8",
    tokens: Annotated[int, typer.Option(help="Tokens of each text.", metavar="<int>")] = 128,
    repeats: Annotated[int, typer.Option(help="Runs of each kind.", metavar="<int>")] = 3,
    newcomer: Annotated[int, typer.Option(help="Tokens of the prompt that comes late.", metavar="<int>")] = 900,
    deterministic: Annotated[bool, typer.Option(help="No kernel whose roundings depend on the pass.")] = False,
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure what batches gain in every mode, against one request at a time."""
    numbers, wanted = [int(number) for number in clients.split(",")], modes.split(",")
    most = max(numbers)
    pipeline = Pipeline.load(
        bundle, threads=threads, max_sequences=most + 1, retained_slots=0, deterministic=deterministic
    )
    read = [prompt.text for prompt in read_prompts(prompts)]
    texts = [read[index % len(read)] for index in range(most)]
    measured = {(mode, count): Measured() for mode in wanted for count in (1, *numbers)}
    pipeline.generate(texts, mode=wanted[0], max_new_tokens=8, ignore_eos=True)  # warm
    for _ in range(repeats):
        for mode in wanted:
            options = {"mode": mode, "max_new_tokens": tokens, "ignore_eos": True}
            alone = _measure(pipeline, measured[mode, 1], texts, 1, options)
            for count in numbers:
                found = _measure(pipeline, measured[mode, count], texts[:count], count, options)
                pairs = zip(found, alone, strict=False)
                measured[mode, count].different = sum(a.token_ids != b.token_ids for a, b in pairs)
    gaps = _newcomer_gaps(pipeline, texts, newcomer, wanted[0])
    kinds: list[dict[str, Any]] = [
        {
            "mode": mode,
            "clients": count,
            **runs.to_json(),
            "over_one_client": _ratio(runs, measured[mode, 1]),
            "over_plain": _ratio(runs, measured[PLAIN, count]) if (PLAIN, count) in measured else None,
        }
        for (mode, count), runs in measured.items()
    ]
    if as_json:
        print_json({"runs": kinds, "longest_gap_ms": gaps})
        return
    table = Table("mode", "clients", "tokens/s", "over one client", "over plain", "host", "sequences/pass", "different")
    for run in kinds:
        over_plain = "" if run["over_plain"] is None else f"{run['over_plain']:.2f}"
        table.add_row(
            run["mode"],
            str(run["clients"]),
            f"{run['tokens_per_s']:.0f}",
            f"{run['over_one_client']:.2f}",
            over_plain,
            f"{run['host_share']:.1%}",
            f"{run['sequences_per_pass']:.1f}",
            str(run["different_texts"]),
        )
    out.print(table)
    out.print(
        f"longest time between two tokens of {most} streams: {gaps['before']:.0f} ms, and {gaps['with']:.0f} ms while "
        f"a newcomer's prompt of {newcomer} tokens was read, which took {gaps['first_token']:.0f} ms to its first token"
    )


def _measure(
    pipeline: Pipeline, runs: Measured, texts: Sequence[str], clients: int, options: dict[str, Any]
) -> list[Completion]:
    """Generate for `texts`, all at once or one at a time, and add what it took to `runs`."""
    before, begun = pipeline.passes, perf_counter()
    found = (
        [pipeline.generate(text, **options) for text in texts]
        if clients == 1
        else pipeline.generate(list(texts), **options)
    )
    seconds, after = perf_counter() - begun, pipeline.passes
    runs.speeds.append(sum(len(completion.token_ids) for completion in found) / seconds)
    runs.host.append(1 - (after.seconds - before.seconds) / seconds)
    runs.sequences.append((after.sequences - before.sequences) / (after.passes - before.passes))
    return found


def _newcomer_gaps(pipeline: Pipeline, texts: Sequence[str], tokens: int, mode: str) -> dict[str, float]:
    """Milliseconds between two chunks of a running stream at most, before and while a long prompt is read."""
    source = pipeline.encode(" ".join(texts), raw=True)
    prompt = (source * (tokens // len(source) + 1))[:tokens]
    streams = [pipeline.stream(text, mode=mode, max_new_tokens=400, ignore_eos=True) for text in texts]
    stop = threading.Event()
    arrivals: list[list[float]] = [[] for _ in streams]

    def read(index: int) -> None:
        for chunk in streams[index]:
            if chunk.token_ids:
                arrivals[index].append(perf_counter())
            if stop.is_set():
                break
        streams[index].close()

    readers = [threading.Thread(target=read, args=(index,)) for index in range(len(streams))]
    for reader in readers:
        reader.start()
    while min(len(times) for times in arrivals) < 24:
        stop.wait(0.01)
    came = perf_counter()
    first = pipeline.generate(prompt, mode=mode, max_new_tokens=1, ignore_eos=True, raw=True)
    done = perf_counter()
    stop.set()
    for reader in readers:
        reader.join()
    steady = max(times[8] for times in arrivals)  # behind all of the prompts
    gaps = [(late, 1e3 * (late - early)) for times in arrivals for early, late in pairwise(times)]
    return {
        "before": max(gap for at, gap in gaps if steady < at < came),
        "with": max((gap for at, gap in gaps if came <= at <= done + 0.5), default=0.0),
        "first_token": first.stats.ttft_ms,
    }


def _ratio(found: Measured, over: Measured) -> float:
    return statistics.median(found.speeds) / statistics.median(over.speeds)


if __name__ == "__main__":
    typer.run(main)
