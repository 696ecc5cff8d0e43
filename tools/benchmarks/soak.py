"""A long mixed load, through the library and through a Triton server: what is lost on the way, with a plot.

    python -m tools.benchmarks.soak BUNDLE soak.png

Requests of every mode, greedy and sampled, of several lengths, from four clients at once; a third are given up on the
way. Every text is compared with the one that its request gives alone. Memory and open descriptors of the process that
runs the model are read a hundred times.
"""

from __future__ import annotations

import os
import queue
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import local
from typing import Annotated, Any

import numpy as np
import typer

from tests.support.tritonserver import TritonServer
from via_sd.contract.generation_options import for_mode
from via_sd.export.triton import ServingOptions, write_repository
from via_sd.progress import Progress
from via_sd.runtime import Pipeline
from via_sd.tools.commands.console import CommandError, command, out, progress_bar
from via_sd.tools.plotting import pyplot

CLIENTS, KINDS, READINGS = 4, 48, 100
MODES = ("plain", "speculative", "cascade", "routed")


@dataclass(frozen=True)
class Load:
    """What became of a load.

    Attributes:
        wrong: requests whose text was not the one they give alone.
        megabytes, descriptors: of the process that runs the model, after every hundredth of the requests.
    """

    requests: int
    wrong: int
    megabytes: list[float]
    descriptors: list[int]

    def __str__(self) -> str:
        quarter = len(self.megabytes) // 4
        return (
            f"{self.requests} requests, {self.wrong} wrong, {self.megabytes[quarter]:.1f} MB after a quarter and "
            f"{self.megabytes[-1]:.1f} MB at the end, "
            f"{self.descriptors[quarter]} and {self.descriptors[-1]} open descriptors"
        )


def request(number: int, modes: tuple[str, ...]) -> dict[str, Any]:
    """Request `number` of the load; there are `KINDS` of them."""
    kind = number % KINDS
    given = {
        "prompt": f"Tell me {'more ' * (kind % 5)}about the number {kind % 7}.",
        "mode": modes[kind % len(modes)],
        "temperature": 0.8 if kind % 3 == 1 else 0.0,
        "seed": kind,
        "max_new_tokens": 6 + kind % 19,
        "ignore_eos": True,
        "raw": True,
    }
    return for_mode(given)


def run(pid: int, requests: int, answer: Callable[[int], bool], progress: Progress, what: str) -> Load:
    """Send `requests` from all clients at once; `answer` says whether the text of a request was right."""
    megabytes, descriptors, wrong = [], [], 0
    with ThreadPoolExecutor(CLIENTS) as pool:
        for reading in range(READINGS):
            part = range(requests * reading // READINGS, requests * (reading + 1) // READINGS)
            wrong += list(pool.map(answer, part)).count(False)
            pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
            megabytes.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)
            descriptors.append(len(os.listdir(f"/proc/{pid}/fd")))
            progress(what, (reading + 1) / READINGS)
    return Load(requests, wrong, megabytes, descriptors)


def through_library(
    pipeline: Pipeline, wanted: list[str], modes: tuple[str, ...], requests: int, progress: Progress
) -> Load:
    """The load on `pipeline`."""

    def answer(number: int) -> bool:
        if number % 3 == 0:
            with closing(pipeline.stream(**request(number, modes))) as stream:
                for _, _chunk in zip(range(number % 5), stream, strict=False):
                    pass
            return True
        text: str = pipeline.generate(**request(number, modes)).text
        return text == wanted[number % KINDS]

    return run(os.getpid(), requests, answer, progress, "through the library")


def through_triton(bundle: Path, wanted: list[str], modes: tuple[str, ...], requests: int, progress: Progress) -> Load:
    """The load on a server of `bundle`; a request that is given up is cancelled with its stream."""
    import tritonclient.grpc as grpc

    own = local()
    clients: list[Any] = []

    def tensor(name: str, kind: str, value: Any, dtype: Any) -> Any:
        made = grpc.InferInput(name, [1, 1], kind)
        made.set_data_from_numpy(np.array([[value]], dtype=dtype))
        return made

    with tempfile.TemporaryDirectory() as folder:
        options = ServingOptions(threads=1, slots=CLIENTS)
        write_repository(bundle, folder, options=options, copy=False)
        with TritonServer(Path(folder)) as server:
            (model,) = (int(child) for child in _descendants(server.pid) if "model.py" in _command(int(child)))

            def answer(number: int) -> bool:
                given = request(number, modes)
                if not hasattr(own, "client"):
                    own.client = grpc.InferenceServerClient(server.grpc_url)
                    clients.append(own.client)
                answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
                own.client.start_stream(callback=lambda result, error: answers.put((result, error)))
                inputs = [
                    tensor("text_input", "BYTES", given["prompt"].encode(), np.object_),
                    tensor("max_tokens", "INT32", given["max_new_tokens"], np.int32),
                    tensor("temperature", "FP32", given["temperature"], np.float32),
                    tensor("random_seed", "UINT64", given["seed"], np.uint64),
                    tensor("mode", "BYTES", given["mode"].encode(), np.object_),
                    tensor("ignore_eos", "BOOL", True, np.bool_),
                    tensor("stream", "BOOL", number % 3 == 0, np.bool_),
                ]
                own.client.async_stream_infer("via_sd", inputs, enable_empty_final_response=True)
                pieces, final = [], False
                while not final:
                    result, error = answers.get()
                    if error is not None:
                        raise error
                    if (text := result.as_numpy("text_output")) is not None:
                        pieces.append(text[0].decode())
                    final = result.get_response().parameters["triton_final_response"].bool_param
                    if number % 3 == 0 and len(pieces) > number % 5:
                        own.client.stop_stream(cancel_requests=True)
                        return True
                own.client.stop_stream()
                return "".join(pieces) == wanted[number % KINDS]

            try:
                return run(model, requests, answer, progress, "through Triton")
            finally:
                for client in clients:
                    client.close()


def _descendants(pid: int) -> list[str]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [*children, *(below for child in children for below in _descendants(int(child)))]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def plot(loads: dict[str, Load], path: Path) -> None:
    """Memory and descriptors over the requests, for each way."""
    figure, axes = pyplot().subplots(len(loads), 1, figsize=(8, 3 * len(loads)), layout="constrained", squeeze=False)
    for (name, load), (memory,) in zip(loads.items(), axes, strict=True):
        at = np.linspace(load.requests / READINGS, load.requests, READINGS)
        memory.plot(at, load.megabytes, color="tab:blue")
        memory.set(
            title=f"{name}: {load.requests} requests, {load.wrong} wrong", xlabel="requests", ylabel="resident MB"
        )
        memory.set_ylim(0, 1.2 * max(load.megabytes))
        files = memory.twinx()
        files.plot(at, load.descriptors, "--", color="0.5")
        files.set(ylabel="open descriptors (dashed)", ylim=(0, 1.5 * max(load.descriptors)))
    figure.savefig(path, dpi=120)
    pyplot().close(figure)


@command
def main(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.")],
    picture: Annotated[Path, typer.Argument(help="PNG to write.")],
    requests: Annotated[int, typer.Option(min=READINGS, help="Requests through the library.")] = 20_000,
    served: Annotated[int, typer.Option(help="Requests through Triton; 0: none.")] = 2_000,
) -> None:
    """Send BUNDLE a long mixed load and plot what it leaves."""
    pyplot()  # a missing matplotlib is reported now
    pipeline = Pipeline.load(bundle, threads=1, max_sequences=CLIENTS, deterministic=True, policy=False)
    modes = MODES if pipeline.bundle.slim is not None else MODES[:2]
    wanted = [pipeline.generate(**request(kind, modes)).text for kind in range(KINDS)]
    with progress_bar() as progress:
        loads = {"library": through_library(pipeline, wanted, modes, requests, progress)}
        if served:
            loads["Triton"] = through_triton(bundle, wanted, modes, served, progress)
    plot(loads, picture)
    for name, load in loads.items():
        out.print(f"{name}: {load}", highlight=False)
    if any(load.wrong for load in loads.values()):
        raise CommandError("some texts were wrong")


if __name__ == "__main__":
    typer.run(main)
