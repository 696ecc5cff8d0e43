"""What reads other people's files refuses or reads what seeded mutations make of them, in bounded time and memory."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tools.benchmarks.fuzz.runner as runner
from tests.support import ROOT
from tools.benchmarks.fuzz.mutations import mutate
from tools.benchmarks.fuzz.readers import READERS
from tools.benchmarks.fuzz.runner import Reader, fuzz, mutated
from via_sd.errors import MaskError

SLOW = ("gguf", "safetensors")


@pytest.mark.parametrize(
    ("readers", "executions"), [([r for r in READERS if r not in SLOW], 40), (list(SLOW), 5)], ids=["fast", "slow"]
)
def test_mutated_inputs_are_read_or_refused(readers, executions, models):
    command = [sys.executable, "-W", "ignore", "-m", "tools.benchmarks.fuzz", *readers, "--models", str(models)]
    done = subprocess.run(
        [*command, "--executions", str(executions), "--seed", "1"],
        capture_output=True, text=True, cwd=ROOT, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("│")]
    counts = {cells[1]: [int(cells[i]) for i in (3, 5, 7)] for cells in rows}
    assert sorted(counts) == sorted(readers)
    assert all(done == executions for done, _, _ in counts.values())
    assert sum(refused for _, _, refused in counts.values()) > executions / 2


def endings() -> dict[str, object]:
    def fail(folder: Path) -> None:
        raise ValueError("a bug")

    def refuse(folder: Path) -> None:
        raise MaskError("no mask")

    return {
        "read": lambda folder: None,
        "refused": refuse,
        "ValueError in test_fuzz.py:fail": fail,
        "SIGKILL": lambda folder: os.kill(os.getpid(), signal.SIGKILL),
        "more than 0.2 s": lambda folder: time.sleep(30),
        "MemoryError in test_fuzz.py:<lambda>": lambda folder: bytearray(2 * runner.MEMORY),
    }


@pytest.mark.parametrize("kind", endings())
def test_every_way_in_which_a_reader_can_end_is_counted(kind, tmp_path, monkeypatch):
    if kind.startswith("more than"):
        monkeypatch.setattr(runner, "SECONDS", 0.2)
    reader = Reader(endings()[kind], {"file": b"content"}, ["file"])
    report = fuzz(reader, "reader", tmp_path, seed=0, executions=2)
    assert report.executions == 2
    assert (report.read, report.refused) == (2 * (kind == "read"), 2 * (kind == "refused"))
    assert dict(report.kinds) == ({} if kind in ("read", "refused") else {kind: 2})


def test_an_input_follows_from_its_number_and_is_another_than_the_last():
    reader = Reader(lambda folder: None, {"a": json.dumps({"x": [1, {"y": 2}]}).encode(), "b": b"bytes"}, ["a", "b"])
    made = [mutated(reader, "reader", 3, number) for number in range(50)]
    assert made == [mutated(reader, "reader", 3, number) for number in range(50)]
    assert len(set(made)) > 40
    assert {file for file, _ in made} == {"a", "b"}


def test_json_stays_json_most_of_the_time():
    content, whole = json.dumps({"a": [1, 2], "b": {"c": "d"}}).encode(), 0
    for seed in range(200):
        try:
            json.loads(mutate(content, random.Random(seed)))
            whole += 1
        except (ValueError, RecursionError):
            continue
    assert 100 < whole < 200
