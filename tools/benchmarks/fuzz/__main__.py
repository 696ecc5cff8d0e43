"""Fuzz what reads files and requests that other people made.

    python -m tools.benchmarks.fuzz [READER]… [--seconds 60] [--seed 0]

Each execution changes a good input and reads it in a process bounded in time and memory. It may succeed, or be refused
with an error of ours; anything else is a finding, which `--seed S --first N --executions 1` runs again.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.table import Table

from tools.benchmarks.fuzz.readers import READERS, make_models
from tools.benchmarks.fuzz.runner import Report, fuzz, mutated
from via_sd.tools.commands.console import CheckFailedError, CommandError, command, err, out


@command
def main(
    readers: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(READERS)}; all by default.")] = None,
    seconds: Annotated[float, typer.Option(help="Time for each reader.")] = 60.0,
    executions: Annotated[int, typer.Option(help="Inputs for each reader, at most.")] = 1 << 60,
    seed: Annotated[int, typer.Option(help="Of the mutations.")] = 0,
    first: Annotated[int, typer.Option(help="Number of the first input.")] = 0,
    models: Annotated[Path | None, typer.Option(help="Keep the tiny models in this folder.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the inputs of findings to this folder.")] = None,
) -> None:
    """Read mutated inputs, and count what becomes of them; exit code 1 if anything but a refusal went wrong."""
    wanted = readers or list(READERS)
    if unknown := sorted(set(wanted) - set(READERS)):
        raise CommandError(f"no reader is called {', '.join(unknown)}; readers are {', '.join(READERS)}")
    table = Table("reader", "executions", "read", "refused", "findings", "kinds", "slowest s", "peak MB")
    reports: dict[str, Report] = {}
    with TemporaryDirectory() as scratch:
        made = make_models(models or Path(scratch) / "models")
        for name in wanted:
            reader = READERS[name](made)
            work = Path(scratch) / name
            report = fuzz(reader, name, work, seed=seed, first=first, executions=executions, seconds=seconds)
            reports[name] = report
            counts = (report.executions, report.read, report.refused, report.kinds.total(), len(report.kinds))
            table.add_row(name, *map(str, counts), f"{report.slowest:.1f}", f"{report.peak_mb:.0f}")
            for finding in report.findings:
                again = f"{name} --seed {seed} --first {finding.number} --executions 1"
                err.print(
                    f"{finding.kind} ({report.kinds[finding.kind]} times): {again}", highlight=False, markup=False
                )
                err.print(finding.trace, highlight=False, markup=False)
                if save is not None:
                    save.mkdir(parents=True, exist_ok=True)
                    file, content = mutated(reader, name, seed, finding.number)
                    (save / f"{name}-{finding.number}-{Path(file).name}").write_bytes(content)
    out.print(table)
    if found := [name for name, report in reports.items() if report.kinds]:
        raise CheckFailedError(f"findings in {', '.join(found)}")


if __name__ == "__main__":
    typer.run(main)
