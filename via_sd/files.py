"""Files and directories that appear whole or not at all, JSON that is read in one way, and the fast hash."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

_CHUNK = 1 << 22
#: Largest JSON file that is taken from elsewhere; the largest tokenizers have about 35 MB.
JSON_BYTES = 256 << 20


def write_whole(path: Path, text: str) -> None:
    """Write or replace the UTF-8 file `path` in one step."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


@contextmanager
def whole_directory(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary sibling of `target` that takes its name when the block ends well and vanishes when it does not.

    Args:
        replace: take the place of a directory `target`; without it, one that holds anything raises `OSError`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    replaced = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if replace and target.exists():
            target.rename(replaced)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def read_json(path: Path) -> Any:
    """What the JSON file `path` holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON in UTF-8; the message says where and why.
    """
    return parse_json(path.read_bytes())


def parse_json(content: bytes) -> Any:
    """What JSON in UTF-8 says; raises `ValueError` for anything else."""
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply to be read") from None


def write_json(path: Path, data: Any) -> None:
    """Write or replace the JSON file `path` in one step."""
    write_whole(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def read_chunks(path: Path) -> Iterator[memoryview]:
    """The bytes of a file, a few megabytes at a time; each piece is void when the next is asked for."""
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            yield view[:count]


def fast_hash(path: Path) -> str:
    """XXH3-64 of a file's bytes, as hexadecimal."""
    digest = xxhash.xxh3_64()
    for chunk in read_chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def read_json_object(path: Path, failure: type[Exception]) -> dict[str, Any]:
    """The object in the JSON file `path`, which comes from elsewhere.

    Raises:
        failure: no regular file (a pipe has no end), one above `JSON_BYTES`, no JSON, or something else than an object.
    """
    if not path.is_file():
        raise failure(f"{path} is {'no regular file' if path.exists() else 'missing'}; wanted a JSON file")
    if path.stat().st_size > JSON_BYTES:
        raise failure(f"{path} has {path.stat().st_size} bytes, wanted at most {JSON_BYTES}")
    try:
        data = read_json(path)
    except ValueError as error:  # a number of thousands of digits, too
        raise failure(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise failure(f"{path} holds {type(data).__name__}, wanted an object")
    return data
