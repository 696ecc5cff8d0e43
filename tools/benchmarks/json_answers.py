"""What speculation gains on answers that follow a JSON schema, and what the grammar costs: a BUNDLE, mode by mode.

    python -m tools.benchmarks.json_answers BUNDLE

Every mode answers every prompt in turn, greedy and with the same schema, several times over. Speed is that of the whole
answer after its first token; the grammar's share is the time in its masks, its tests of drafts and its forced tokens
over the time of the whole answer.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from via_sd.contract.mode_names import MODES, PLAIN, ROUTED, SLIM_MODES
from via_sd.runtime import Completion, Pipeline
from via_sd.runtime.generation.grammar import GrammarConstraint
from via_sd.tools.commands.console import CheckFailedError, command, out
from via_sd.tools.commands.options import Backend, Threads


def _record(**properties: Any) -> str:
    return json.dumps(
        {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    )


_NAME: dict[str, Any] = {"type": "string", "maxLength": 40}
_PERSON = _record(
    first_name=_NAME, last_name=_NAME, age={"type": "integer", "minimum": 0, "maximum": 120},
    city=_NAME, occupation={"type": "string", "maxLength": 60},
    languages={"type": "array", "items": _NAME, "maxItems": 4},
)  # fmt: skip
_ORDER = _record(
    customer=_NAME, product={"type": "string", "maxLength": 60},
    quantity={"type": "integer", "minimum": 1, "maximum": 99}, delivery={"enum": ["standard", "express", "collection"]},
    address={"type": "string", "maxLength": 80}, gift_wrapping={"type": "boolean"},
)  # fmt: skip
_WEATHER = _record(
    place=_NAME, condition={"enum": ["sunny", "cloudy", "rainy", "snowy"]},
    temperature_celsius={"type": "integer", "minimum": -60, "maximum": 60},
    wind={"type": "object", "properties": {"direction": {"enum": ["north", "east", "south", "west"]},
          "speed_kmh": {"type": "integer", "minimum": 0, "maximum": 300}},
          "required": ["direction", "speed_kmh"], "additionalProperties": False},
)  # fmt: skip
#: What is asked, and the schema of the answer.
TASKS = (
    ("Maria Lindqvist, 34, lives in Oslo and builds bridges for a living. She speaks Swedish, Norwegian and "
     "English.", _PERSON),
    ("Old Tom Barker of Whitby has mended nets for sixty of his 78 years; he knows English and a little "
     "Dutch.", _PERSON),
    ("Please send three blue teapots to Anna Kowalska, 12 Mill Lane, York, as fast as you can. They are a "
     "present.", _ORDER),
    ("J. Okafor will pick up one second-hand bicycle himself; his address is 7 Harbour Street, Leith.", _ORDER),
    ("In Bergen it pours, at nine degrees, with forty kilometres an hour of wind from the west.", _WEATHER),
    ("Clear sky over Seville today, 36 degrees, hardly a breath of wind from the south: 5 km/h.", _WEATHER),
)  # fmt: skip
QUESTION = "Write the following as a JSON object with the fields {}.\n\n{}"


@dataclass
class Figures:
    """Of one mode: tokens per second of each answer, the grammar's share of its time, and the answers."""

    speeds: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0


@contextmanager
def timed_grammar() -> Iterator[Callable[[], float]]:
    """Time what grammars do in the block: what it gives returns the milliseconds since it was called last."""
    spent = [0.0]
    methods = {name: getattr(GrammarConstraint, name) for name in ("__call__", "allowed", "forced")}

    def timing(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(*arguments: Any) -> Any:
            begun = perf_counter()
            try:
                return method(*arguments)
            finally:
                spent[0] += perf_counter() - begun

        return timed

    def take() -> float:
        taken, spent[0] = 1e3 * spent[0], 0.0
        return taken

    for name, method in methods.items():
        setattr(GrammarConstraint, name, timing(method))
    try:
        yield take
    finally:
        for name, method in methods.items():
            setattr(GrammarConstraint, name, method)


def measure(pipeline: Pipeline, modes: list[str], repeats: int, length: int) -> dict[str, Figures]:
    """Figures by mode; the modes take turns on every prompt, and begin with another each time."""
    figures = {mode: Figures() for mode in modes}
    with timed_grammar() as take:
        for repeat in range(repeats + 1):  # the first is not counted
            for at, (text, schema) in enumerate(TASKS):
                prompt = QUESTION.format(", ".join(json.loads(schema)["properties"]), text)
                turn = (repeat + at) % len(modes)
                for mode in modes[turn:] + modes[:turn]:
                    take()
                    found = pipeline.generate(prompt, mode=mode, json_schema=schema, max_new_tokens=length)
                    if repeat:
                        _count(figures[mode], found, take())
    return figures


def _count(figures: Figures, found: Completion, grammar_ms: float) -> None:
    if found.finish_reason == "stop":
        json.loads(found.text)
    figures.speeds.append(found.stats.tokens_per_s or 0.0)
    figures.shares.append(grammar_ms / found.stats.time_ms.total)
    figures.answers.append(found.token_ids)
    figures.drafted += found.stats.drafted_tokens
    figures.accepted += found.stats.accepted_tokens


@command
def main(
    bundle: Annotated[Path, typer.Argument(help="Bundle with a chat template.", metavar="<path>")],
    repeats: Annotated[int, typer.Option(help="Runs of every prompt that count.", metavar="<int>")] = 3,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.", metavar="<int>")] = 200,
    threads: Threads = None,
    backend: Backend = "onnxruntime",
) -> None:
    """Measure what speculation gains on JSON answers, and what their grammar costs."""
    pipeline = Pipeline.load(bundle, backend=backend, threads=threads, max_sequences=1)
    modes = [mode for mode in MODES if mode not in SLIM_MODES or pipeline.bundle.slim is not None]
    figures = measure(pipeline, modes, repeats, max_new_tokens)
    plain = figures[PLAIN]
    for mode, of in figures.items():
        ratios = [speed / base for speed, base in zip(of.speeds, plain.speeds, strict=True)]
        low, high = min(ratios), max(ratios)
        tokens = sum(map(len, of.answers)) / len(of.answers)
        out.print(
            f"{mode}: {statistics.median(of.speeds):.1f} tokens/s, {statistics.median(ratios):.2f}x plain "
            f"(least {low:.2f}, greatest {high:.2f}), {tokens:.0f} tokens an answer, "
            f"{of.accepted} of {of.drafted} drafted tokens kept, grammar {100 * statistics.mean(of.shares):.1f} % of "
            f"the time (most {100 * max(of.shares):.1f} %)",
            soft_wrap=True,
        )
        if mode != ROUTED and pipeline.bundle.precision == "fp32" and of.answers != plain.answers:
            raise CheckFailedError(f"{mode} gave other answers than plain")


if __name__ == "__main__":
    typer.run(main)
