"""The `files` of a manifest: size, sha256 and XXH3 of every file, and whether a file is the one described."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import xxhash

from via_sd.errors import BundleError
from via_sd.files import fast_hash, read_chunks

#: Size in bytes, sha256 and XXH3-64 as hexadecimal.
FileEntry = dict[str, Any]


def check_listed(folder: Path, files: Collection[str]) -> None:
    """Raise `BundleError` for a file in `folder` that is not among `files`, paths relative to it.

    What loads a graph may open whatever lies beside it: weights that a manifest does not list are not checked.
    """
    for file in sorted(folder.iterdir()):
        if not file.is_dir() and file.name not in files:
            raise BundleError(f"{file} is not listed in the manifest, so nothing has checked it; remove it")


def resolved_within(directory: Path, relative: str) -> bool:
    """Whether the file `relative` of `directory` lies in it, links resolved."""
    return (directory / relative).resolve().is_relative_to(directory.resolve())


def describe_files(directory: Path, leave_out: Collection[str] = ()) -> dict[str, FileEntry]:
    """The entry of every file below `directory`, by path relative to it.

    Args:
        leave_out: names of files that get none.
    """
    files = sorted(file for file in directory.rglob("*") if file.is_file() and file.name not in leave_out)
    return {file.relative_to(directory).as_posix(): describe_file(file) for file in files}


def describe_file(file: Path) -> FileEntry:
    """The entry of one file."""
    sha, fast = hashlib.sha256(), xxhash.xxh3_64()
    for chunk in read_chunks(file):
        sha.update(chunk)
        fast.update(chunk)
    return {"size": file.stat().st_size, "sha256": sha.hexdigest(), "xxh3": fast.hexdigest()}


def difference(file: Path, entry: Mapping[str, Any], *, verify: bool = True) -> str | None:
    """What `file` is that its entry does not say, such as "is missing"; None if it is the file described.

    Args:
        verify: compare the XXH3 (a few gigabytes per second); sizes are always compared.
    """
    try:
        status = file.lstat()
    except OSError:
        return "is missing"
    if stat.S_ISLNK(status.st_mode):
        return "is a link, wanted the file itself"
    if not stat.S_ISREG(status.st_mode):
        return "is not a file"
    if status.st_size != entry["size"]:
        return f"has {status.st_size} bytes, wanted {entry['size']}"
    if verify and (found := fast_hash(file)) != entry["xxh3"]:
        return f"is changed (XXH3 {found}, wanted {entry['xxh3']})"
    return None
