"""What a slim-verifier costs in memory: a process that runs full and slim over one that runs full alone.

    python -m tools.benchmarks.memory BUNDLE [--full-only BUNDLE_WITHOUT_MASK]

Each figure is of a process of its own that loads the bundle and decodes the same prompt to the same length: its
resident memory, and the part of it that is no file's (Linux: `/proc/self/smaps_rollup`; whether a file's page counts as
private depends on who else has mapped it, so no figure is made of that). Without `--full-only`, the process that stands
for full alone has the same bundle and never runs slim.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from via_sd.runtime import load_bundle
from via_sd.tools.commands.console import CommandError, command, out

_PROMPT = "Why do leaves change colour in autumn?"
_CHILD = """
import json, sys
from via_sd.runtime import Pipeline

pipeline = Pipeline.load(sys.argv[1], max_sequences=1, retained_slots=1)
for mode in sys.argv[4:]:
    pipeline.generate(sys.argv[2], mode=mode, max_new_tokens=int(sys.argv[3]), ignore_eos=True)
kilobytes = {}
for line in open("/proc/self/smaps_rollup").read().splitlines()[1:]:
    name, value, *_ = line.split()
    kilobytes[name.rstrip(":")] = int(value)
print(json.dumps({
    "resident": kilobytes["Rss"] / 1024,
    "anonymous": kilobytes["Anonymous"] / 1024,
}))
"""


def measure(bundle: Path, modes: list[str], tokens: int) -> dict[str, float]:
    """Resident and anonymous memory, in MiB, of a process that decodes with `bundle` in each of `modes`."""
    arguments = [sys.executable, "-c", _CHILD, str(bundle), _PROMPT, str(tokens), *modes]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandError(f"the measured process failed: {done.stderr.strip().splitlines()[-1]}")
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


@command
def main(
    bundle: Annotated[Path, typer.Argument(help="Bundle with a slim-verifier.")],
    full_only: Annotated[Path | None, typer.Option(help="The same model exported without a mask.")] = None,
    tokens: Annotated[int, typer.Option(help="Length of every answer.")] = 64,
    repeats: Annotated[int, typer.Option(help="Processes per figure; the median counts.")] = 3,
) -> None:
    """Compare the memory of full and slim together with that of full alone."""
    slim = load_bundle(bundle).slim
    if slim is None:
        raise CommandError(f"{bundle} has no slim-verifier; export it with --mask")
    cases = {"full": (full_only or bundle, ["plain", "plain"]), "full and slim": (bundle, ["plain", "cascade"])}
    figures = {name: [measure(path, modes, tokens) for _ in range(repeats)] for name, (path, modes) in cases.items()}
    medians = {
        name: {kind: statistics.median(f[kind] for f in measured) for kind in ("resident", "anonymous")}
        for name, measured in figures.items()
    }
    table = Table("process", "resident MiB", "anonymous MiB")
    for name, values in medians.items():
        table.add_row(name, f"{values['resident']:.1f}", f"{values['anonymous']:.1f}")
    out.print(table)
    ratio = {kind: medians["full and slim"][kind] / medians["full"][kind] for kind in ("resident", "anonymous")}
    out.print(f"full and slim over full alone: resident {ratio['resident']:.3f}, anonymous {ratio['anonymous']:.3f}")
    tier = load_bundle(bundle, verify=False).manifest["verifier"]["tiers"][slim]
    sizes = [(bundle / name).stat().st_size for name in (tier["graph"], "bundle.json")]
    added = f"{tier['added_bytes'] / 1e6:.1f} MB of weights that only it reads"
    out.print(f"slim graph {sizes[0] / 1e6:.3f} MB, manifest {sizes[1] / 1e6:.3f} MB, {added}")


if __name__ == "__main__":
    typer.run(main)
