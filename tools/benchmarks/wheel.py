"""What the wheel holds: every file of the packages but the benchmarks, and no file from anywhere else.

    python -m tools.benchmarks.wheel [WHEEL]

Builds the wheel from a copy of the sources unless one is given, prints files and bytes by package, and ends with exit
code 1 if the wheel and the sources differ.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.table import Table

from via_sd.tools.commands.console import CheckFailedError, CommandError, command, out

ROOT = Path(__file__).parents[2]
#: What the import root is made of: the folder itself, and the folders its links lead to.
FOLDERS = ("via_sd", "export", "masks", "runtime", "tools")
#: What a build reads beside them.
FILES = ("pyproject.toml", "README.md", "LICENSE")
#: What stays in the repository.
LEFT_OUT = PurePosixPath("via_sd/tools/benchmarks")
_NO_SOURCE = {"__pycache__", ".import_linter_cache"}


@dataclass(frozen=True)
class Contents:
    """Size in bytes of every file of a wheel by its path, metadata apart, and the size of the wheel itself."""

    files: dict[str, int]
    metadata: dict[str, int]
    size: int

    def differences(self, sources: set[str]) -> list[str]:
        """What the wheel lacks, and what it has that is no source."""
        lacking = [f"the wheel lacks {path}" for path in sorted(sources - set(self.files))]
        return lacking + [f"{path} is in the wheel and is no source" for path in sorted(set(self.files) - sources)]


def source_files(root: Path = ROOT) -> set[str]:
    """Paths below the import root that the wheel has to hold, its links followed."""
    return {path.as_posix() for path in _walk(root, PurePosixPath("via_sd")) if LEFT_OUT not in path.parents}


def _walk(root: Path, folder: PurePosixPath) -> Iterator[PurePosixPath]:
    for entry in (root / folder).iterdir():
        path = folder / entry.name
        if entry.is_dir():
            if entry.name not in _NO_SOURCE:
                yield from _walk(root, path)
        else:
            yield path


def read_wheel(file: Path) -> Contents:
    """What is in a wheel."""
    with zipfile.ZipFile(file) as archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    metadata = {name for name in sizes if name.split("/")[0].endswith(".dist-info")}
    return Contents(
        {name: size for name, size in sizes.items() if name not in metadata},
        {name: sizes[name] for name in metadata},
        file.stat().st_size,
    )


def build_wheel(directory: Path, root: Path = ROOT) -> Path:
    """Build the wheel into `directory` with the setuptools that is installed, from a copy of the sources.

    Raises:
        CommandError: the build failed.
    """
    with TemporaryDirectory() as scratch:
        for folder in FOLDERS:
            ignored = shutil.ignore_patterns(*_NO_SOURCE)
            shutil.copytree(root / folder, Path(scratch) / folder, symlinks=True, ignore=ignored)
        for name in FILES:
            shutil.copyfile(root / name, Path(scratch) / name)
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(directory), scratch]
        done = subprocess.run(build, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandError(f"the wheel cannot be built: {(done.stdout + done.stderr).strip().splitlines()[-1]}")
    (wheel,) = directory.glob("*.whl")
    return wheel


@command
def main(
    wheel: Annotated[Path | None, typer.Argument(help="A wheel of ours.", show_default="built here")] = None,
) -> None:
    """List what the wheel holds, and compare it with the sources."""
    with TemporaryDirectory() as scratch:
        contents = read_wheel(wheel or build_wheel(Path(scratch)))
    _show(contents)
    if differences := contents.differences(source_files()):
        raise CheckFailedError("; ".join(differences))


def _show(contents: Contents) -> None:
    packages: dict[str, list[int]] = {}
    for name, size in contents.files.items():
        packages.setdefault("/".join(name.split("/")[:-1][:3]), []).append(size)
    packages["metadata"] = list(contents.metadata.values())
    table = Table("package", "files", "kB", title=f"wheel of {contents.size / 1e3:.0f} kB", title_justify="left")
    for name in sorted(packages):
        table.add_row(name, str(len(packages[name])), f"{sum(packages[name]) / 1e3:.1f}")
    every = [size for sizes in packages.values() for size in sizes]
    table.add_row("all", str(len(every)), f"{sum(every) / 1e3:.1f}")
    out.print(table)


if __name__ == "__main__":
    typer.run(main)
