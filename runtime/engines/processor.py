"""The name of the processor that runs a backend's graphs."""

from __future__ import annotations

import platform
from pathlib import Path

from via_sd.errors import BundleError
from via_sd.runtime.engines.backends import ON_CPU


def processor_name(backend: str) -> str:
    """The name of the CPU, or of the GPU where that runs the graphs of `backend`."""
    return _cpu_name() if backend in ON_CPU else _gpu_name()


def _cpu_name() -> str:
    """The processor's name; on Arm, where the kernel gives none, its makers' numbers."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    fields = [tuple(part.strip() for part in line.split(":", 1)) for line in lines if ":" in line]
    for wanted in (("model name",), ("CPU implementer", "CPU part", "CPU variant")):
        if found := sorted({f"{name} {value}" for name, value in fields if name in wanted}):
            return ", ".join(found).removeprefix("model name ")
    return platform.processor() or platform.machine()


def _gpu_name() -> str:
    from via_sd.runtime.engines.tensorrt.cuda import Cuda

    try:
        return Cuda().name
    except BundleError:  # graphs run on a GPU without the Python package that could name it
        return f"a GPU beside {_cpu_name()}"
