"""How many threads a pass may use: what this process is allowed, not what the host has."""

from __future__ import annotations

import math
import os
from pathlib import Path

_ROOT = Path("/")


def available_threads(root: Path = _ROOT) -> int:
    """Physical cores this process may use: those in its CPU affinity, and no more than its cgroup's CPU quota.

    A second thread on a core that is busy with matrix products gains nothing, so hardware threads of one core count
    once. The quota is rounded up: a process with 1.5 CPUs gets two threads.

    Args:
        root: file system to read `/sys` and `/proc` of.
    """
    cores = _physical_cores(root, _affinity())
    quota = _quota(root)
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _physical_cores(root: Path, cpus: set[int]) -> int:
    """Number of cores that `cpus`, logical CPUs, belong to; a CPU whose core is unknown counts as one."""
    cores = set()
    for cpu in cpus:
        file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cores.add(_text(file) or str(cpu))
    return len(cores)


def _quota(root: Path) -> float | None:
    """CPUs that the control group of this process may use, the least of its ancestors' (version 2, then 1)."""
    quotas = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            quotas += [_quota_v2(folder) for folder in _ancestors(root / "sys/fs/cgroup", path)]
        elif "cpu" in controllers.split(","):
            for mount in (root / "sys/fs/cgroup/cpu", root / "sys/fs/cgroup/cpu,cpuacct"):
                quotas += [_quota_v1(folder) for folder in _ancestors(mount, path)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _ancestors(mount: Path, path: str) -> list[Path]:
    """The group at `path` and those above it. In a container the mount itself is the group, whatever the path says."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:count]) for count in range(len(parts) + 1)]


def _quota_v2(group: Path) -> float | None:
    quota, _, period = (_text(group / "cpu.max") or "max").partition(" ")
    return None if quota == "max" else int(quota) / int(period or 100_000)


def _quota_v1(group: Path) -> float | None:
    quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
