"""The number of threads follows what the process may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from via_sd.runtime.engines import threads
from via_sd.runtime.engines.ort import session_options
from via_sd.runtime.engines.threads import available_threads


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of four cores with two hardware threads each (CPU n and n + 4), all of them allowed."""
    for cpu in range(8):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(threads, "_affinity", lambda: set(range(8)))
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_hardware_threads_of_one_core_count_once(host):
    assert available_threads(host) == 4


def test_cores_outside_the_affinity_do_not_count(host, monkeypatch):
    monkeypatch.setattr(threads, "_affinity", lambda: {0, 1, 5})
    assert available_threads(host) == 2


@pytest.mark.parametrize(("limit", "wanted"), [("max 100000", 4), ("150000 100000", 2), ("50000 100000", 1)])
def test_a_quota_of_control_groups_version_2_limits_and_is_rounded_up(host, limit, wanted):
    write(host, {"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/cpu.max": f"{limit}\n"})
    write(host, {"sys/fs/cgroup/pod/box/cpu.max": "max 100000\n"})
    assert available_threads(host) == wanted


@pytest.mark.parametrize(("quota", "wanted"), [("-1", 4), ("200000", 2)])
def test_a_quota_of_control_groups_version_1_limits(host, quota, wanted):
    group = "sys/fs/cgroup/cpu,cpuacct"
    write(host, {"proc/self/cgroup": "4:cpu,cpuacct:/docker/1\n", f"{group}/cpu.cfs_quota_us": f"{quota}\n"})
    write(host, {f"{group}/cpu.cfs_period_us": "100000\n"})
    assert available_threads(host) == wanted


def test_this_process_has_at_most_the_cpus_it_may_run_on():
    assert 1 <= available_threads() <= len(os.sched_getaffinity(0))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_process_bound_to_one_cpu_gets_one_thread():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from via_sd.runtime.engines.ort import session_options; print(session_options(None).intra_op_num_threads)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_sessions_do_not_spin_between_passes():
    """Two sessions in one process would take the cores from each other."""
    assert session_options(2).get_session_config_entry("session.force_spinning_stop") == "1"
    assert session_options(2).intra_op_num_threads == 2
