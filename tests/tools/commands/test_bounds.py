"""A refusal costs little: processor time and memory of a command that is given what nobody should serve."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(sys.executable).with_name("via-sd-export")
#: Seconds of processor time, and MiB of resident memory; a command that generates a word takes a third of either.
SECONDS, RESIDENT = 30, 700

_MEASURE = """
import resource, subprocess, sys
seconds = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
code = subprocess.run(sys.argv[2:]).returncode
print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def change(bundle: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((bundle / "bundle.json").read_text())
    edit(manifest)
    (bundle / "bundle.json").write_text(json.dumps(manifest))


def long_prompt(bundle: Path) -> list[str]:
    (bundle.parent / "prompt.txt").write_text("x" * 100_000_000)
    return ["--prompt-file", str(bundle.parent / "prompt.txt")]


def nested(bundle: Path) -> list[str]:
    (bundle / "bundle.json").write_text("[" * 10_000_000)
    return ["--prompt", "x"]


def bomb(bundle: Path) -> list[str]:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'x' * 999 }}{% endfor %}{% endfor %}"
    change(bundle, lambda manifest: manifest["tokenizer"].update(chat_template=loops))
    return ["--prompt", "x"]


def claim(bundle: Path) -> list[str]:
    change(bundle, lambda manifest: manifest.update(max_seq_len=2**40))
    return ["--prompt", "x"]


def threads(bundle: Path) -> list[str]:
    return ["--prompt", "x", "--threads", "1000000"]


@pytest.mark.parametrize("case", [long_prompt, nested, bomb, claim, threads], ids=lambda case: case.__name__)
def test_a_refusal_is_bounded_in_time_and_memory(case, tiny_bundle, tmp_path):
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    arguments = case(bundle)

    # Measured by a process that has little memory itself: what forks counts as the child's until it begins anew.
    command = [sys.executable, "-c", _MEASURE, str(SECONDS), str(SCRIPT), "generate", str(bundle), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    code, peak = map(int, done.stdout.split())
    assert code == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert 10 < peak / 1024 < RESIDENT
