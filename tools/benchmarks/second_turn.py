"""Time to the first token of a second chat turn, with the first turn's KV re-used and without.

    python -m tools.benchmarks.second_turn BUNDLE --prompts PROMPTS

Both pipelines answer the same turns in turn, in one process. The history is the text of the prompts given, repeated
and cut to length; the second turn adds the first answer and a short question to it.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Annotated

import typer

from via_sd.runtime import Pipeline
from via_sd.tools.bench.prompts import read_prompts
from via_sd.tools.commands.console import command, out
from via_sd.tools.commands.options import Threads

_QUESTION = "Which of these would you do first, and why?"


@command
def main(
    bundle: Annotated[Path, typer.Argument(help="Bundle with a chat template.", metavar="<path>")],
    prompts: Annotated[Path, typer.Option(help="JSON lines whose prompts make up the history.", metavar="<path>")],
    history: Annotated[int, typer.Option(help="Tokens of the first turn.", metavar="<int>")] = 900,
    repeats: Annotated[int, typer.Option(help="Conversations measured.", metavar="<int>")] = 7,
    threads: Threads = None,
) -> None:
    """Measure what prefix re-use saves a second chat turn."""
    reusing = Pipeline.load(bundle, threads=threads, max_sequences=1, retained_slots=1)
    fresh = Pipeline.load(bundle, threads=threads, max_sequences=1, retained_slots=0)
    text = "\n".join(prompt.text for prompt in read_prompts(prompts))
    share = history / len(reusing.encode(text))  # of the prompts' text, several times over if it is short
    text = (text * math.ceil(share))[: round(len(text) * share)]
    waited: dict[str, list[float]] = {"with": [], "without": []}
    for repeat in range(repeats):
        first = [{"role": "user", "content": f"Conversation {repeat}. {text}"}]
        for name, pipeline in (("with", reusing), ("without", fresh)):
            answer = pipeline.generate(first, mode="plain", max_new_tokens=24).text
            second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": _QUESTION}]
            found = pipeline.generate(second, mode="plain", max_new_tokens=1, ignore_eos=True)
            waited[name].append(found.stats.ttft_ms)
            prompt_tokens = found.prompt_tokens
    ratio = statistics.median(b / a for a, b in zip(waited["with"], waited["without"], strict=True))
    for name, values in waited.items():
        shown = ", ".join(f"{v:.1f}" for v in (statistics.median(values), min(values), max(values)))
        out.print(f"{name} re-use: {shown} ms to the first token (median, least, greatest of {repeats})")
    out.print(f"re-use makes it {ratio:.1f}x shorter on {prompt_tokens} prompt tokens")


if __name__ == "__main__":
    typer.run(main)
