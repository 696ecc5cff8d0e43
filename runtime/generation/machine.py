"""The machine that a measurement holds for."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass

from via_sd.runtime.engines.processor import processor_name


@dataclass(frozen=True)
class Machine:
    """What a measurement holds for.

    Attributes:
        processor: the name of the CPU, or of the GPU where that runs the graphs.
        cores: logical cores this process may use.
        backend: one of `BACKENDS`.
        threads: threads of one pass as they were asked for.
    """

    processor: str
    cores: int
    backend: str
    threads: int | None

    @property
    def key(self) -> str:
        """Name of the policy's file: readable, and different for machines that differ."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        threads = "all" if self.threads is None else str(self.threads)
        return f"{platform.machine()}-{self.cores}cores-{self.backend}-{threads}threads-{digest}"


def this_machine(backend: str, threads: int | None) -> Machine:
    """The machine this process runs on."""
    return Machine(processor_name(backend), _cores(), backend, threads)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
