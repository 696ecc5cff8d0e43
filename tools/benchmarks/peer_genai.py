"""Compare with onnxruntime-genai on the same checkpoint: plain and n-gram decoding, in turn, in one process.

    pip install onnxruntime-genai==0.18.0
    python -m onnxruntime_genai.models.builder -m CHECKPOINT -o PEER -p int4 -e cpu
    python -m tools.benchmarks.peer_genai BUNDLE PEER --prompts PROMPTS

The peer's model is its own builder's, in its own default int4 (or fp32) form. Both get the same token ids, decode
greedily to the same length with end-of-sequence ignored, and are timed from their first new token to their last. The
peer's n-gram decoding is tried with every setting in `NGRAM_SETTINGS`; the best geometric mean counts.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from via_sd.runtime import Pipeline
from via_sd.tools.bench.prompts import Prompt, read_prompts
from via_sd.tools.commands.console import CommandError, command, err, out, progress_bar

#: The peer's n-gram decoding: length of the n-gram looked up, longest draft.
NGRAM_SETTINGS = ((2, 4), (2, 8), (3, 4), (3, 8), (3, 16))
_OURS = ("plain", "speculative")

Speeds = dict[str, dict[int, list[float]]]


class Peer:
    """The peer's model, decoding token ids to a fixed length."""

    def __init__(self, directory: Path) -> None:
        try:
            import onnxruntime_genai as og
        except ImportError:
            raise CommandError("the peer is not installed: pip install onnxruntime-genai==0.18.0") from None
        self._og = og
        self._model = og.Model(str(directory))

    def decode(
        self, prompt: list[int], new_tokens: int, ngram: tuple[int, int] | None = None
    ) -> tuple[float, list[int]]:
        """Tokens per second after the first new token, and the new tokens."""
        params = self._og.GeneratorParams(self._model)
        length = len(prompt) + new_tokens
        params.set_search_options(do_sample=False, max_length=length, min_length=length)
        if ngram:
            params.set_speculative_options(ngram_size=ngram[0], max_draft_tokens=ngram[1])
        generator = self._og.Generator(self._model, params)
        generator.append_tokens(prompt)
        generator.generate_next_token()
        begun, at_first = perf_counter(), generator.token_count()
        while not generator.is_done():
            generator.generate_next_token()
        seconds = perf_counter() - begun
        tokens = [int(t) for t in generator.get_sequence(0)]
        return (len(tokens) - at_first) / seconds, tokens[len(prompt) :]


@command
def main(
    bundle: Annotated[Path, typer.Argument(help="Our bundle.")],
    peer: Annotated[Path, typer.Argument(help="Directory the peer's model builder wrote for the same checkpoint.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines with prompt and bucket.")],
    max_new_tokens: Annotated[int, typer.Option(help="Length of every generation.")] = 128,
    repeats: Annotated[int, typer.Option(help="Times every prompt is decoded by everyone.")] = 3,
    threads: Annotated[int | None, typer.Option(help="Our threads; the peer takes the physical cores.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every speed there.")] = None,
) -> None:
    """Decode PROMPTS with a bundle of ours and with the peer, in turn."""
    wanted = read_prompts(prompts)
    pipeline, other = Pipeline.load(bundle, threads=threads, max_sequences=1, retained_slots=1), Peer(peer)
    speeds: Speeds = {}
    host: dict[str, list[float]] = {mode: [] for mode in _OURS}
    with progress_bar() as progress:
        for repeat in range(-1, repeats):  # the first round warms up
            for index, prompt in enumerate(wanted if repeat >= 0 else wanted[:1]):
                _round(pipeline, other, prompt, index, max_new_tokens, speeds if repeat >= 0 else {}, host)
                progress(
                    f"round {repeat + 1} of {repeats}", (max(0, repeat) * len(wanted) + index) / (repeats * len(wanted))
                )
    _print(speeds, host, wanted)
    _print_limit(pipeline, speeds, threads or os.cpu_count() or 1)
    if json_file:
        json_file.write_text(json.dumps(speeds, indent=1) + "\n", encoding="utf-8")
        err.print(f"wrote {json_file}")


def _round(
    pipeline: Pipeline,
    peer: Peer,
    prompt: Prompt,
    index: int,
    length: int,
    speeds: Speeds,
    host: dict[str, list[float]],
) -> None:
    """One prompt through everyone, one after the other."""

    def note(name: str, speed: float) -> None:
        speeds.setdefault(name, {}).setdefault(index, []).append(speed)

    ids = pipeline.encode(prompt.text)
    note("genai plain", peer.decode(ids, length)[0])
    for mode in _OURS:
        stats = pipeline.generate(prompt.text, mode=mode, max_new_tokens=length, ignore_eos=True).stats
        assert stats.tokens_per_s is not None
        note(mode, stats.tokens_per_s)
        decode_ms = stats.time_ms.total - stats.ttft_ms
        host[mode].append(stats.time_ms.host / decode_ms)
    for setting in NGRAM_SETTINGS:
        note(f"genai n-gram {setting}", peer.decode(ids, length, setting)[0])


def _print(speeds: Speeds, host: dict[str, list[float]], prompts: list[Prompt]) -> None:
    buckets = list(dict.fromkeys(p.bucket for p in prompts))

    def mean(name: str, bucket: str | None, pick: Any = statistics.median) -> float:
        chosen = [pick(v) for i, v in speeds[name].items() if bucket in (None, prompts[i].bucket)]
        return math.exp(statistics.fmean(math.log(v) for v in chosen))

    table = Table(title="tokens per second: geometric mean over prompts of the median (least, greatest) repeat")
    for name in ("decoder", *buckets, "all", "over genai plain", "outside the engine"):
        table.add_column(name, justify="left" if name == "decoder" else "right")
    for name in speeds:
        table.add_row(
            name,
            *(f"{mean(name, b):.1f}" for b in buckets),
            f"{mean(name, None):.1f} ({mean(name, None, min):.1f}, {mean(name, None, max):.1f})",
            f"{mean(name, None) / mean('genai plain', None):.2f}x",
            f"{statistics.median(host[name]):.1%}" if name in host else "",
        )
    out.print(table)
    best = max((n for n in speeds if "n-gram" in n), key=lambda n: mean(n, None))
    out.print(f"plain over genai plain: {mean('plain', None) / mean('genai plain', None):.3f}x")
    out.print(f"speculative over {best}: {mean('speculative', None) / mean(best, None):.3f}x")
    for bucket in buckets:
        ratio = mean("speculative", bucket) / mean("plain", bucket)
        out.print(f"speculative over plain on {bucket}: {ratio:.3f}x")


def _print_limit(pipeline: Pipeline, speeds: Speeds, threads: int) -> None:
    """How near plain decoding comes to reading every weight once per token and doing nothing else."""
    weights = pipeline.bundle.file(pipeline.bundle.manifest["verifier"]["weights"]).stat().st_size
    bandwidth = read_bandwidth(threads)
    reached = statistics.median(speed for values in speeds["plain"].values() for speed in values) * weights / bandwidth
    out.print(
        f"memory: {bandwidth / 1e9:.1f} GB/s by {threads} threads, {weights / 1e6:.0f} MB of weights: at most "
        f"{bandwidth / weights:.0f} tokens/s; plain reaches {reached:.0%} of that"
    )


def read_bandwidth(threads: int, megabytes: int = 512) -> float:
    """Bytes per second that `threads` threads read together from memory (best of several sweeps)."""
    data = np.ones(megabytes * (1 << 20) // 4, np.float32)
    parts = np.array_split(data, threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(8):
            begun = perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, data.nbytes / (perf_counter() - begun))
    return best


if __name__ == "__main__":
    typer.run(main)
