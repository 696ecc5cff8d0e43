"""`python -m via_sd.tools.commands.gpu_check BUNDLE`: does what cannot be done without a GPU, and prints one table.

Builds the engines that are missing, runs every tier on the GPU, compares its logits with ONNX Runtime on the CPU, and
times the decoding modes. On a GPU that TensorRT for RTX has no kernels for, ONNX Runtime's CUDA provider runs the same
portable graphs. `--backend portable-cpu` goes the same way on any machine, to see that the way is there.
"""

from __future__ import annotations

import platform
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.table import Table

from via_sd.runtime import load_bundle
from via_sd.runtime.engines.backends import BACKENDS, ENGINES, ONNXRUNTIME, open_engines
from via_sd.runtime.engines.tensorrt.cuda import Cuda
from via_sd.tools.bench import PLAIN, Prompt, run_bench, settings_of, summarise
from via_sd.tools.calibration.rounds import pipeline_by
from via_sd.tools.commands.console import CheckFailedError, CommandError, command, err, out, print_json, progress_bar
from via_sd.tools.commands.engine_build import Dtype, build_here
from via_sd.tools.commands.options import AsJson
from via_sd.tools.prediction.latency import measure_costs
from via_sd.tools.validation.engines import compare_tiers

AUTO = "auto"
RTX = ENGINES[0]
#: Prompts of the kinds a drafter behaves differently on.
PROMPTS = (
    Prompt(
        "Repeat exactly: the ships that pass the lighthouse are counted every morning, and every evening too.", "copy"
    ),
    Prompt("Write a Python function that returns the mean of a list of numbers.", "code"),
    Prompt("Why do leaves change colour in autumn?", "chat"),
)
#: Largest mean KL divergence (nats) from float32 on the CPU, by dtype, at which a tier counts as right.
LIMITS = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 2e-2}


@command
def gpu_check(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory; missing engines are built into it.")],
    backend: Annotated[
        str, typer.Option(help=f"What runs the tiers: {', '.join(BACKENDS[1:])}, or auto, which asks the GPU.")
    ] = AUTO,
    dtype: Annotated[Dtype, typer.Option(help="Of weights, activations and KV.")] = Dtype.fp16,
    reference: Annotated[str | None, typer.Option(help="The checkpoint, when the bundle is quantised.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of every answer.")] = 128,
    repeats: Annotated[int, typer.Option(help="Generations of each prompt and mode.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Build, run, compare and time the tiers of BUNDLE on this machine's GPU."""
    chosen = _choose(backend)
    with progress_bar() as progress:
        target = chosen if chosen in ENGINES else RTX  # a build for RTX leaves the portable graphs, GPU or none
        built = build_here(bundle, target, dtype=dtype.value, reference=reference, progress=progress).built
        loaded = load_bundle(bundle)
        progress("loading", None)
        start = perf_counter()
        verifier, drafter = open_engines(loaded, chosen)
        load_seconds = perf_counter() - start
        progress("comparing with ONNX Runtime on the CPU", None)
        tiers = compare_tiers(verifier, open_engines(loaded, ONNXRUNTIME, device="cpu")[0], loaded.identity.vocab_size)
        progress("timing passes", None)
        costs = measure_costs(loaded, verifier, drafter)
        pipeline = pipeline_by(costs, loaded, verifier, drafter)
        modes = [PLAIN, "speculative", *(["cascade", "routed"] if loaded.slim else [])]
        samples = run_bench(
            pipeline, PROMPTS, settings_of(modes), max_new_tokens=max_new_tokens, repeats=repeats, progress=progress
        )
    facts = {
        "machine": _machine(chosen),
        "backend": chosen,
        "dtype": dtype.value,
        "build_seconds": built,
        "load_seconds": load_seconds,
        "tiers": {name: {**tier, "step_ms": costs.step_ms[name]} for name, tier in tiers.items()},
        "modes": {mode: figures["all"] for mode, figures in summarise(samples, PROMPTS).items()},
    }
    if as_json:
        print_json(facts)
    else:
        _show(facts)
    limit = LIMITS[dtype.value]
    wrong = [name for name, tier in tiers.items() if not tier["mean_kl"] <= limit]
    if wrong and loaded.precision == "fp32":  # else the reference is the one that is off
        raise CheckFailedError(f"tiers {', '.join(wrong)} are further than {limit:g} nats from float32 on the CPU")


def _choose(backend: str) -> str:
    if backend in BACKENDS[1:]:
        return backend
    if backend != AUTO:
        raise CommandError(f"--backend is {backend!r}, wanted {AUTO}, {', '.join(BACKENDS[1:])}")
    from via_sd.export.tensorrt.library import RTX_CAPABILITIES

    return RTX if Cuda().compute_capability in RTX_CAPABILITIES else "portable-cuda"


def _machine(backend: str) -> str:
    if backend == "portable-cpu":
        return f"{platform.machine()}, no GPU used"
    cuda = Cuda()
    return f"{cuda.name}, compute capability {cuda.compute_capability}"


def _show(facts: dict[str, Any]) -> None:
    table = Table(title=f"{facts['machine']}: {facts['backend']}, {facts['dtype']}", title_justify="left")
    for name in (
        "what",
        "nats from CPU fp32",
        "same token",
        "ms at 1 / 2 / 4 / 8 / 16 tokens",
        "tokens/s",
        "over plain",
    ):
        table.add_column(name, justify="left" if name == "what" else "right")
    for name, tier in facts["tiers"].items():
        times = " / ".join(f"{ms:.2f}" for ms in tier["step_ms"].values())
        table.add_row(f"tier {name}", f"{tier['mean_kl']:.2g}", f"{tier['top1_agreement']:.1%}", times, "", "")
    for name, mode in facts["modes"].items():
        speed, ratio = (mode[key]["median"] for key in ("tokens_per_s", "over_plain"))
        table.add_row(f"mode {name}", "", f"{mode['equal_to_plain']:.0%} of texts", "", f"{speed:.0f}", f"{ratio:.2f}x")
    out.print(table)
    built = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in facts["build_seconds"].items()) or "nothing to do"
    err.print(f"built: {built}; loaded in {facts['load_seconds']:.1f} s", highlight=False)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(gpu_check)
    app()
