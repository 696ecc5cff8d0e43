"""A checkpoint's directory without links: mobius-onnx takes no weights from outside the directory it is given."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory


@contextlib.contextmanager
def plain_directory(directory: Path) -> Iterator[Path]:
    """`directory` where its weights lie in it; else one with the same files, for as long as the block runs.

    The files of a hub cache are links out of its snapshots. They get second names (hard links), which takes no space;
    where the file system has none, or another one holds the temporary files (see `TMPDIR`), they are copied.
    """
    root = directory.resolve()
    if all(file.resolve().is_relative_to(root) for file in directory.glob("*.safetensors")):
        yield directory
        return
    with TemporaryDirectory(prefix="via-sd-checkpoint-") as plain:
        for file in directory.iterdir():
            if file.is_file():
                _give_name(file.resolve(), Path(plain) / file.name)
        yield Path(plain)


def _give_name(file: Path, name: Path) -> None:
    try:
        os.link(file, name)
    except OSError:
        shutil.copyfile(file, name)
