"""Files and directories that appear whole or not at all, room for them, JSON that is read in one way, and the hash."""

from __future__ import annotations

import errno
import glob
import json
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from via_sd.errors import DiskSpaceError

try:
    import fcntl
except ImportError:  # Windows: directories have no locks, and leftovers stay
    fcntl = None  # type: ignore[assignment]

_HAS_LOCKS = fcntl is not None
_CHUNK = 1 << 22
#: Names of what a run that writes a directory has beside it, before the number of its process.
_PARTIAL, _REPLACED = ".partial-", ".replaced-"
#: Largest JSON file that is taken from elsewhere; the largest tokenizers have about 35 MB.
JSON_BYTES = 256 << 20


def write_whole(path: Path, text: str) -> None:
    """Write or replace the UTF-8 file `path` in one step."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def whole_directory(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary sibling of `target` that takes its name when the block ends well and vanishes when it does not.

    Args:
        replace: take the place of a directory `target`; without it, one that holds anything raises `OSError`, as does
            another run that is writing `target`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if running := clear_leftovers(target):
        raise FileExistsError(errno.EEXIST, f"another run is writing it ({running[0]})", str(target))
    partial = target.with_name(f".{target.name}{_PARTIAL}{os.getpid()}")
    replaced = target.with_name(f".{target.name}{_REPLACED}{os.getpid()}")

    def make() -> Path:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(exist_ok=True)
        return partial

    with _locked(make):
        try:
            yield partial
            if replace and target.exists():
                target.rename(replaced)
            elif target.is_dir() and any(target.iterdir()):
                raise FileExistsError(errno.EEXIST, "another run has written it in the meantime", str(target))
            partial.rename(target)
        finally:
            if replaced.exists() and not target.exists():  # interrupted between the two renames
                replaced.rename(target)
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(replaced, ignore_errors=True)


def clear_leftovers(target: Path) -> list[Path]:
    """Remove what runs that were killed left beside `target`, with a warning; put back what one had moved away.

    Returns:
        The temporary siblings of runs that are still writing `target`.
    """
    running = []
    for partial in sorted(target.parent.glob(f".{glob.escape(target.name)}{_PARTIAL}*")):
        if not _clear(partial):
            running.append(partial)
    for replaced in sorted(target.parent.glob(f".{glob.escape(target.name)}{_REPLACED}*")):
        if replaced.with_name(replaced.name.replace(_REPLACED, _PARTIAL)).exists():
            continue  # its run is still going on
        if target.exists():
            _clear(replaced)
        else:
            replaced.rename(target)
            warnings.warn(f"put {target} back, which an interrupted run had moved away", stacklevel=4)
    return running


@contextmanager
def scratch_directory(prefix: str) -> Iterator[Path]:
    """A directory in the temporary folder that vanishes when the block ends.

    Those of the same `prefix` that runs of this user left when they were killed are removed first, with a warning.
    """
    for left in sorted(Path(tempfile.gettempdir()).glob(f"{glob.escape(prefix)}*")):
        _clear(left)
    with _locked(lambda: Path(tempfile.mkdtemp(prefix=prefix))) as scratch:
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def check_space(directory: Path, size: int, what: str) -> None:
    """Raise `DiskSpaceError` unless `size` bytes fit where `directory` is, or will be.

    Args:
        what: what is to be written, for the message.
    """
    place = next(folder for folder in (directory, *directory.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if free < size:
        raise DiskSpaceError(
            f"the disk of {place} has {free / 1e6:.1f} MB free, wanted {size / 1e6:.1f} MB for {what}; "
            "free some space, or choose another place"
        )


def _clear(left: Path) -> bool:
    """Remove a directory that no running process holds, with a warning; False if one does."""
    if not _HAS_LOCKS:
        return True
    try:
        lock = _lock(left)
    except OSError:  # gone in the meantime, another user's, or a file system without locks
        return True
    if lock is None:
        return False
    shutil.rmtree(left, ignore_errors=True)
    os.close(lock)
    warnings.warn(f"removed {left}, which an interrupted run left", stacklevel=5)
    return True


@contextmanager
def _locked(make: Callable[[], Path]) -> Iterator[Path]:
    """A new directory that no other run takes for a leftover while the block runs."""
    directory, lock = make(), None
    while _HAS_LOCKS:
        try:
            lock = _lock(directory)
            if lock is not None and os.path.samestat(os.fstat(lock), directory.stat()):
                break
        except FileNotFoundError:
            pass
        except OSError:  # a file system without locks
            break
        directory = make()  # another run took it for a leftover before it was locked
    try:
        yield directory
    finally:
        if lock is not None:
            os.close(lock)


def _lock(directory: Path) -> int | None:
    """A descriptor that holds the lock of `directory` until it is closed; None if another process holds it.

    Raises:
        OSError: there is no such directory (any more), or it is a link, or another user's.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to another user", str(directory))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_json(path: Path) -> Any:
    """What the JSON file `path` holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON in UTF-8, which the message says where and why, no regular file (a pipe has no end),
            or larger than `JSON_BYTES`.
    """
    return parse_json(read_regular(path, JSON_BYTES))


def read_regular(path: Path, limit: int) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: it cannot be read.
        ValueError: no regular file (a pipe has no end), or more than `limit` bytes.
    """
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no regular file")
    if status.st_size > limit:
        raise ValueError(f"it has {status.st_size} bytes, wanted at most {limit}")
    return path.read_bytes()


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
    try:
        data = read_json(path)
    except OSError as error:
        raise failure(f"{path} cannot be read: {error.strerror or error}; wanted a JSON file") from None
    except ValueError as error:  # a number of thousands of digits, too
        raise failure(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise failure(f"{path} holds {type(data).__name__}, wanted an object")
    return data
