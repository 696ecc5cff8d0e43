"""What serving costs: the same requests through the library and through a real tritonserver, in one run.

    python -m tools.benchmarks.triton_bench BUNDLE

Reported are the server's time per request over the library's own at concurrency 1, the throughput at higher
concurrency over that at 1, and how evenly concurrent requests were served. What is compared is measured in turn, a
ratio is that of neighbours in time, and the median of the ratios is what is reported.
"""

from __future__ import annotations

import json
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from tests.support.tritonserver import TritonServer
from via_sd.export.triton import ServingOptions, write_repository
from via_sd.runtime import Pipeline

PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain how a bicycle stays upright.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "List the planets of the solar system, and say one thing about each planet of the solar system.",
)


@dataclass(frozen=True)
class Answer:
    """One request's text, chunks that carried text, and seconds to the first of them and in all."""

    text: str
    chunks: int
    first: float
    total: float


class Client:
    """One gRPC stream to the model; one request at a time."""

    def __init__(self, url: str, model: str) -> None:
        import tritonclient.grpc as grpc

        self._grpc = grpc
        self._model = model
        self._answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client = grpc.InferenceServerClient(url)
        self._client.start_stream(callback=lambda result, error: self._answers.put((result, error)))

    def ask(self, prompt: str, tokens: int, *, stream: bool, mode: str) -> Answer:
        """Sends one request and reads its responses to the last."""
        inputs = [
            self._tensor("text_input", "BYTES", prompt.encode(), np.object_),
            self._tensor("max_tokens", "INT32", tokens, np.int32),
            self._tensor("stream", "BOOL", stream, np.bool_),
            self._tensor("ignore_eos", "BOOL", True, np.bool_),
            self._tensor("mode", "BYTES", mode.encode(), np.object_),
        ]
        begun, first, pieces = time.perf_counter(), 0.0, []
        self._client.async_stream_infer(self._model, inputs, enable_empty_final_response=True)
        while True:
            result, error = self._answers.get()
            if error is not None:
                raise error
            if (text := result.as_numpy("text_output")) is not None:  # the empty final response has none
                pieces.append(text[0].decode())
            first = first or time.perf_counter() - begun
            if result.get_response().parameters["triton_final_response"].bool_param:
                return Answer("".join(pieces), len(pieces), first, time.perf_counter() - begun)

    def close(self) -> None:
        """Ends the stream."""
        self._client.stop_stream()
        self._client.close()

    def _tensor(self, name: str, kind: str, value: Any, dtype: Any) -> Any:
        tensor = self._grpc.InferInput(name, [1, 1], kind)
        tensor.set_data_from_numpy(np.array([[value]], dtype=dtype))
        return tensor


def overhead(pipeline: Pipeline, url: str, model: str, tokens: int, repeats: int, mode: str) -> dict[str, Any]:
    """Seconds per request of the library and the server, in turn, for each prompt `repeats` times."""
    client = Client(url, model)

    def library(prompt: str) -> tuple[str, float]:
        begun = time.perf_counter()
        text = pipeline.generate(prompt, max_new_tokens=tokens, ignore_eos=True, raw=True, mode=mode).text
        return text, time.perf_counter() - begun

    def server(prompt: str, stream: bool) -> tuple[str, float]:
        answer = client.ask(prompt, tokens, stream=stream, mode=mode)
        return answer.text, answer.total

    ways: dict[str, Callable[[str], tuple[str, float]]] = {
        "library": library,
        "whole": partial(server, stream=False),
        "streamed": partial(server, stream=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for number, prompt in enumerate(PROMPTS):
            # Whoever comes after the other process finds the caches cold: each comes first as often.
            turn = (repeat + number) % len(ways)
            order = [*ways][turn:] + [*ways][:turn]
            answers = {name: ways[name](prompt) for name in order}
            if repeat == 0:  # fills caches and prefix buffers on both sides; from then on both feed the same steps
                continue
            if len({text for text, _ in answers.values()}) > 1:
                raise RuntimeError(f"the server's text is not the library's for {prompt!r}: {answers}")
            for name, (_, taken) in answers.items():
                seconds[name].append(taken)
    client.close()
    ratios = {
        name: statistics.median(a / b for a, b in zip(seconds[name], seconds["library"], strict=True))
        for name in ("whole", "streamed")
    }
    medians = {f"{name}_s": statistics.median(values) for name, values in seconds.items()}
    return {**medians, **{f"{name}_over_library": ratio for name, ratio in ratios.items()}}


def throughput(url: str, model: str, tokens: int, turns: int, concurrency: int, mode: str) -> dict[str, Any]:
    """Tokens per second with `concurrency` clients that each send `turns` requests, one after the other.

    A client asks what it asked before, or what nobody else asks meanwhile. So every prompt is found in a KV slot, and
    the steps are the same at any concurrency.
    """
    clients = [Client(url, model) for _ in range(concurrency)]
    answers: list[Answer] = []

    def work(number: int) -> None:
        for turn in range(turns):
            prompt = PROMPTS[(number + turn * concurrency) % len(PROMPTS)]
            answers.append(clients[number].ask(prompt, tokens, stream=True, mode=mode))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(concurrency)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - begun
    for client in clients:
        client.close()
    return {
        "concurrency": concurrency,
        "tokens_per_s": tokens * len(answers) / took,
        "median_s": statistics.median(answer.total for answer in answers),
        "longest_s": max(answer.total for answer in answers),
        "longest_first_token_s": max(answer.first for answer in answers),
    }


def bench(
    bundle: Path,
    *,
    tokens: int,
    repeats: int,
    concurrencies: tuple[int, ...],
    mode: str,
    options: ServingOptions,
) -> dict[str, Any]:
    """Everything this module measures, as one JSON object."""
    with tempfile.TemporaryDirectory() as folder:
        write_repository(bundle, folder, options=options, copy=False)
        pipeline = Pipeline.load(bundle, threads=options.threads, retained_slots=options.slots)
        with TritonServer(Path(folder)) as server:
            costs = overhead(pipeline, server.grpc_url, "via_sd", tokens, repeats, mode)
            # One round more, to fill the slots.
            _, *rounds = [
                [throughput(server.grpc_url, "via_sd", tokens, max(2, 4 // n), n, mode) for n in (1, *concurrencies)]
                for _ in range(repeats + 1)
            ]
    for alone, *others in rounds:
        for load in (alone, *others):
            load["throughput_over_one"] = load["tokens_per_s"] / alone["tokens_per_s"]
            # With n at once, each has a fair share of one n-th: what a request took over n times what one takes alone.
            load["longest_over_fair_share"] = load["longest_s"] / (load["concurrency"] * alone["median_s"])
    loads = [
        {figure: statistics.median(load[figure] for load in same) for figure in same[0]}
        for same in zip(*rounds, strict=True)
    ]
    worst = max(load["longest_over_fair_share"] for each in rounds for load in each)
    return {
        "mode": mode,
        "tokens": tokens,
        "repeats": repeats,
        "overhead": costs,
        "throughput": loads,
        "longest_over_fair_share": worst,
    }


def main(
    bundle: Annotated[Path, typer.Argument(help="bundle directory")],
    tokens: Annotated[int, typer.Option(help="tokens per request")] = 64,
    repeats: Annotated[int, typer.Option(help="times each prompt is asked")] = 5,
    mode: Annotated[str, typer.Option(help="decoding mode")] = "plain",
    threads: Annotated[int | None, typer.Option(help="threads of one engine step")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(help="clients at once, beside one; 4 if not given")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="file for the figures as JSON")] = None,
) -> None:
    """Measure what serving BUNDLE through Triton costs over using it as a library."""
    others = tuple(concurrency or (4,))
    options = ServingOptions(threads=threads, slots=max(8, *others))
    result = bench(bundle, tokens=tokens, repeats=repeats, concurrencies=others, mode=mode, options=options)
    console = Console()
    overheads = result["overhead"]
    console.print(
        f"{mode}, {tokens} tokens: library {1e3 * overheads['library_s']:.0f} ms per request, server "
        f"{overheads['whole_over_library']:.3f} of that whole, {overheads['streamed_over_library']:.3f} streamed"
    )
    table = Table("concurrency", "tokens/s", "over one", "median s", "longest s", "longest over fair share")
    for each in result["throughput"]:
        table.add_row(
            f"{each['concurrency']:.0f}",
            f"{each['tokens_per_s']:.1f}",
            f"{each['throughput_over_one']:.2f}",
            f"{each['median_s']:.2f}",
            f"{each['longest_s']:.2f}",
            f"{each['longest_over_fair_share']:.2f}",
        )
    console.print(table)
    console.print(f"the longest any request took over its fair share: {result['longest_over_fair_share']:.2f}")
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
