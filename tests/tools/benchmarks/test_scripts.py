"""What measures this repository runs from its root, and CONTRIBUTING.md says what each script is for."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

import tools.benchmarks
from tests.support import ROOT

FOLDER = Path(tools.benchmarks.__file__).parent
SCRIPTS = sorted(path.stem for path in FOLDER.iterdir() if not path.name.startswith("__"))


@pytest.mark.parametrize("name", [f"tools.benchmarks.{name}" for name in SCRIPTS] + ["tests.support.tritonserver"])
def test_a_script_says_how_it_is_used(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    assert not ended.value.code
    assert "Usage:" in capsys.readouterr().out


def test_contributors_find_every_script() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert len(SCRIPTS) >= 9
    assert re.findall(r"^\| `python -m tools\.benchmarks\.(\w+)[^|]*` \| \S[^|]* \|$", text, re.MULTILINE) == SCRIPTS
