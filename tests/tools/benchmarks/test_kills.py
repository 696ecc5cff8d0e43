"""A command that is killed leaves nothing that the next run does not clear, and the next run's result is the same."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import ROOT


@pytest.mark.parametrize(("command", "moments"), [("triton", 2), ("export", 1)])
def test_a_killed_command_is_run_again_to_the_same_result(command, moments, models):
    arguments = [command, "--moments", str(moments), "--models", str(models)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tools.benchmarks.kills", *arguments],
        capture_output=True, text=True, cwd=ROOT, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = [line.split("│") for line in done.stdout.splitlines() if line.startswith(f"│ {command}")]
    _, _, kills, ended_before, _, wrong, _ = (cell.strip() for cell in row)
    assert (kills, wrong) == (f"{2 * moments}", "0")
    assert int(ended_before) < 2 * moments, "nothing was killed"
