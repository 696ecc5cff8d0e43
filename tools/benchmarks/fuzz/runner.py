"""Runs a reader on mutated inputs, in processes that are bounded in time and memory and may die.

Every input follows from reader, seed and number, so that each finding can be run again alone.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.benchmarks.fuzz.mutations import mutate
from via_sd.errors import ViaSdError

#: What one execution may take: seconds, and bytes of address space beyond what the process has before it.
SECONDS, MEMORY = 20.0, 3 << 30


@dataclass(frozen=True)
class Reader:
    """Something that reads what other people made.

    Attributes:
        read: reads the input in a directory; an expected failure is a `ViaSdError`, or one of `expected`.
        files: the files of a good input, by their names.
        mutated: names of the files that are changed, one in each execution.
        fragments: of the language that they are written in.
    """

    read: Callable[[Path], object]
    files: Mapping[str, bytes]
    mutated: Sequence[str]
    fragments: Sequence[str] = ()
    expected: tuple[type[Exception], ...] = ()


@dataclass(frozen=True)
class Finding:
    """An execution that ended otherwise than it may: its number, how it ended, and the traceback if it has one."""

    number: int
    kind: str
    trace: str = ""


@dataclass
class Report:
    """What became of the executions; one finding of each kind is kept."""

    executions: int = 0
    read: int = 0
    refused: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    peak_mb: float = 0.0
    slowest: float = 0.0

    def add(self, finding: Finding) -> None:
        if finding.kind not in self.kinds:
            self.findings.append(finding)
        self.kinds[finding.kind] += 1


def fuzz(
    reader: Reader, name: str, work: Path, *, seed: int, first: int = 0, executions: int = 1 << 60, seconds: float = 1e9
) -> Report:
    """Read mutated inputs until `executions` are done or `seconds` have passed.

    Args:
        name: of the reader; part of the seed.
        work: a folder for inputs.
        first: number of the first input.
    """
    report, number, end = Report(), first, time.monotonic() + seconds
    with mmap.mmap(-1, 8) as shared:
        while number < first + executions and time.monotonic() < end:
            said, write = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(said)
                _run(reader, name, work, seed, number, first + executions, end, shared, write)
            os.close(write)
            number = _listen(report, said, child, shared)
    return report


def mutated(reader: Reader, name: str, seed: int, number: int) -> tuple[str, bytes]:
    """Name and content of the file that is changed in one execution."""
    random_ = random.Random(f"{name} {seed} {number}")
    file = random_.choice(list(reader.mutated))
    return file, mutate(reader.files[file], random_, reader.fragments)


def _run(
    reader: Reader, name: str, work: Path, seed: int, number: int, last: int, end: float, shared: mmap.mmap, write: int
) -> None:
    """The child: one execution after the other; what it says of each goes through the pipe."""
    try:
        os.setsid()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        warnings.simplefilter("ignore")
        # Died of, not handled: nothing that a reader does can hold it up.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        while number < last and time.monotonic() < end:
            shared[:8] = struct.pack("<q", number)
            started = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            kind, trace = _execute(reader, work / "input", *mutated(reader, name, seed, number))
            signal.setitimer(signal.ITIMER_REAL, 0)
            line = json.dumps([number, kind, trace, round(time.monotonic() - started, 3)])
            os.write(write, line.encode("ascii") + b"\n")
            number += 1
    finally:
        os._exit(0)


def _execute(reader: Reader, folder: Path, file: str, content: bytes) -> tuple[str, str]:
    shutil.rmtree(folder, ignore_errors=True)
    for name, original in reader.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if name == file else original)
    expected: tuple[type[Exception], ...] = (ViaSdError, *reader.expected)
    try:
        reader.read(folder)
    except expected:
        return "refused", ""
    except BaseException as error:  # noqa: BLE001 - that is what is looked for
        own = str(Path(__file__).parent)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(own)]
        ours = next((f for f in reversed(frames) if "site-packages" not in f.filename), frames[-1] if frames else None)
        place = f" in {Path(ours.filename).name}:{ours.name}" if ours else ""
        return f"{type(error).__name__}{place}", traceback.format_exc()[-3_000:]
    return "read", ""


def _listen(report: Report, said: int, child: int, shared: mmap.mmap) -> int:
    """Take what a child says until it ends; the number of the execution after its last."""
    done = -1
    with os.fdopen(said) as lines:
        for line in lines:
            number, kind, trace, seconds = json.loads(line)
            done = number
            report.executions += 1
            report.slowest = max(report.slowest, seconds)
            if kind in ("read", "refused"):
                setattr(report, kind, getattr(report, kind) + 1)
            else:
                report.add(Finding(number, kind, trace))
    _, status, usage = os.wait4(child, 0)
    report.peak_mb = max(report.peak_mb, usage.ru_maxrss / 1024)
    running = int(struct.unpack("<q", shared[:8])[0])
    if running != done:
        cause = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "an early end"
        kind = f"more than {SECONDS:g} s" if cause == "SIGALRM" else cause
        report.executions += 1
        report.add(Finding(running, kind))
    return running + 1
