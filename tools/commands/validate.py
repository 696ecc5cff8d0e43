"""`via-sd-export validate`: does what runs a bundle compute what transformers computes from its checkpoint?"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from tokenizers import Tokenizer

from via_sd.masks import ModelIdentity
from via_sd.runtime import load_bundle
from via_sd.runtime.engines.backends import ONNXRUNTIME, open_engines
from via_sd.runtime.engines.protocol import ReadableEngine
from via_sd.tools.commands.console import CheckFailedError, CommandError, command, out, print_json, progress_bar
from via_sd.tools.commands.options import AsJson, Backend, TrustEngines

if TYPE_CHECKING:
    from via_sd.tools.validation.validate import TierReport

#: Name of the KV buffers' dtype -> precision of a backend over graphs that `build` made.
_PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
#: What is shown of an output.
_FIGURES = ("max_abs", "mean_abs", "median_abs", "mean_rel", "median_rel")


@command
def validate(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.")],
    reference: Annotated[str, typer.Option(help="The verifier's checkpoint: directory, hub id, or GGUF file.")],
    drafter_reference: Annotated[
        str | None, typer.Option(help="A model drafter's checkpoint; the drafter is left out without it.")
    ] = None,
    backend: Backend = ONNXRUNTIME,
    layers: Annotated[
        int | None, typer.Option(help="Compare keys and values of the first N layers.", show_default="all", min=0)
    ] = None,
    atol: Annotated[float | None, typer.Option(help="Absolute tolerance.", show_default="by precision")] = None,
    rtol: Annotated[float | None, typer.Option(help="Relative tolerance.", show_default="by precision")] = None,
    trust_engines: TrustEngines = False,
    as_json: AsJson = False,
) -> None:
    """Compare every tier of BUNDLE with transformers: logits, keys and values, NaN and infinity."""
    from via_sd.export.sources.checkpoint import open_checkpoint
    from via_sd.tools.validation.validate import TOLERANCES, validate_model

    loaded = load_bundle(bundle)
    described = loaded.manifest["drafter"]
    if drafter_reference is not None and described["kind"] != "model":
        raise CommandError(f"--drafter-reference: the drafter of {bundle} is {described['kind']}, no model of its own")
    verifier, drafter = open_engines(loaded, backend, trust_engines=trust_engines)
    precision = loaded.precision if backend == ONNXRUNTIME else _PRECISIONS[verifier.kv["dtype"]]
    chosen = TOLERANCES[precision]
    tolerance = replace(
        chosen,
        absolute=chosen.absolute if atol is None else atol,
        relative=chosen.relative if rtol is None else rtol,
    )
    pairs: list[tuple[str, ReadableEngine, str, ModelIdentity]] = [("verifier", verifier, reference, loaded.identity)]
    if drafter is not None and drafter_reference is not None:
        pairs.append(("drafter", drafter, drafter_reference, ModelIdentity.from_json(described["model"])))
    tokenizer = Tokenizer.from_file(str(loaded.file("tokenizer.json")))
    found: dict[str, list[TierReport]] = {}
    with progress_bar() as progress:
        for name, engine, source, identity in pairs:
            with open_checkpoint(source, lambda text: progress(text, None)) as checkpoint:
                if checkpoint.identity != identity:
                    raise CommandError(f"{source} is another model than the {name} of {bundle}")
                if checkpoint.source is not None:
                    raise CommandError(
                        f"{source} holds an ONNX decoder, and validate compares with transformers; give the checkpoint "
                        "it was made from (a Hugging Face directory, a hub id, or a GGUF file)"
                    )
                masks = loaded.masks if name == "verifier" else {}
                found[name] = validate_model(
                    engine,
                    checkpoint.directory,
                    checkpoint.config,
                    masks,
                    tokenizer,
                    tolerance,
                    layers=layers,
                    progress=progress,
                )
    if as_json:
        facts = {
            "backend": backend,
            "precision": precision,
            "tolerance": asdict(tolerance),
            "passed": all(report.passed for reports in found.values() for report in reports),
            "models": {
                name: [{**asdict(report), "passed": report.passed} for report in reports]
                for name, reports in found.items()
            },
        }
        print_json(facts)
    else:
        for name, reports in found.items():
            _show(f"{name} on {backend}, {precision}, against transformers", reports)
    failed = [f"{r.tier} ({_reason(r)})" for reports in found.values() for r in reports if not r.passed]
    if failed:
        raise CheckFailedError(f"not what transformers computes: {'; '.join(failed)}")


def _reason(report: TierReport) -> str:
    if not report.finite:
        return "NaN or infinity"
    wrong = [output.name for output in report.outputs if not output.passed]
    first = next((name for name in wrong if "layer" in name), wrong[0])
    return f"{len(wrong)} of {len(report.outputs)} outputs, first {first}"


def _show(title: str, reports: list[TierReport]) -> None:
    """Logits of every step; of keys and values those that differ, and the largest figures of the others."""
    table = Table(title=title, title_justify="left")
    for heading in ("tier", "output", *_FIGURES, ""):
        table.add_column(heading.replace("_", " "), justify="right" if heading in _FIGURES else "left")
    for report in reports:
        layers = [output for output in report.outputs if "layer" in output.name and output.passed]
        for output in report.outputs:
            if output not in layers:
                figures = (f"{getattr(output, name):.2g}" for name in _FIGURES)
                table.add_row(report.tier, output.name, *figures, "" if output.passed else "[red]differs[/]")
        if layers:
            worst = (f"{max(getattr(output, name) for output in layers):.2g}" for name in _FIGURES)
            table.add_row(report.tier, f"worst of {len(layers)} keys and values", *worst, "")
    out.print(table)
    for report in reports:
        finite = "no NaN or infinity" if report.finite else "NaN or infinity found"
        law = f"KL {report.mean_kl:.2g} nats, same likeliest token at {report.top1_agreement:.1%} of positions"
        out.print(f"{report.tier}: {law}, {finite}", highlight=False)
