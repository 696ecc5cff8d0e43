"""`via-sd-export demo`: the whole way on a real model, from a GGUF file to a table of modes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from via_sd.runtime import MODES, Pipeline
from via_sd.tools.bench.prompts import Prompt
from via_sd.tools.bench.run import run_bench, settings_of, summarise
from via_sd.tools.bench.tables import comparison
from via_sd.tools.commands.console import command, err, out, progress_bar
from via_sd.tools.commands.tier_text import show, summary
from via_sd.tools.demo.packaged_models import cache_directory
from via_sd.tools.demo.smollm2 import fetch_smollm2

#: One prompt of each kind a drafter behaves differently on.
PROMPTS = (
    Prompt(
        "Repeat the following text exactly:\nThe lighthouse keeper writes the weather into a ledger each day. He "
        "notes the wind, the height of the waves and the ships that pass. In winter the ledger is thin, because the "
        "fog hides what the lamp cannot reach.",
        "copy",
    ),
    Prompt(
        "Add type hints to this function:\n```python\ndef mean(values):\n    total = 0.0\n    for value in values:\n"
        "        total += value\n    return total / len(values)\n```",
        "code",
    ),
    Prompt("Why do leaves change colour in autumn?", "chat"),
)


@command
def demo(
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Where the bundle goes; used again if it is there.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of every answer.")] = 64,
) -> None:
    """Fetch SmolLM2-135M, export it with a slim-verifier, generate in every mode, and compare the modes."""
    bundle = out_dir or cache_directory() / "smollm2-135m-int8-slim-demo"
    with progress_bar() as progress:
        if not bundle.exists():
            _export(bundle, progress)
        progress("loading", None)
        pipeline = Pipeline.load(bundle, max_sequences=1)
    what = f" ({bundle}), float32, with all of it in int8 as slim-verifier"
    out.print(Text.assemble(("SmolLM2-135M-Instruct", "bold"), what))
    for mode in MODES:
        _show(pipeline, mode, max_new_tokens)
    with progress_bar() as progress:
        samples = run_bench(
            pipeline, PROMPTS, settings_of(MODES), max_new_tokens=max_new_tokens, repeats=1, progress=progress
        )
    figures = summarise(samples, PROMPTS)
    out.print(comparison(figures))
    cascade, speculative = (figures[mode]["all"]["tokens_per_s"]["median"] for mode in ("cascade", "speculative"))
    plain = figures["plain"]["all"]["tokens_per_s"]["median"]
    pays = "pays" if cascade > speculative else "does not pay"
    out.print(
        f"The slim tier {pays} here: cascade, an exact mode, is {cascade / plain:.2f}x of plain decoding and "
        f"{cascade / speculative:.2f}x of speculative, which has no slim tier.",
        highlight=False,
    )


def _export(bundle: Path, progress: Any) -> None:
    from via_sd.export import export_bundle

    export_bundle(fetch_smollm2(progress), bundle, slim_precision="int8", max_seq_len=2048, progress=progress)


def _show(pipeline: Pipeline, mode: str, max_new_tokens: int) -> None:
    # The default router leaves slim out where it does not pay; here every tier is to be seen.
    router = "paper" if mode == "routed" else None
    out.rule(Text.assemble((mode, "bold"), f", router {router}" if router else ""), align="left")
    stream = pipeline.stream(PROMPTS[-1].text, mode=mode, router=router, max_new_tokens=max_new_tokens, audit_tail=True)
    for chunk in stream:
        show(chunk.pieces)
    out.print()
    err.print(summary(stream.completion), highlight=False)
