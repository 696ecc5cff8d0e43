"""Packages import one way, without cycles: the contracts in pyproject.toml hold, and they see everything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import via_sd
from tests.support import ROOT

grimp = pytest.importorskip("grimp", reason="needs the dev extra")

#: The package under test: the checkout's, or the one that a wheel installed.
PACKAGE = Path(via_sd.__file__).parent


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts on the `via_sd` in `folder`, or on the installed one where there is none."""
    lint_imports = str(Path(sys.executable).with_name("lint-imports"))
    return subprocess.run(
        [lint_imports, "--no-cache", "--no-logo", str(ROOT / "pyproject.toml")],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_contracts_hold():
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout
    assert " 0 broken." in done.stdout


def test_the_contracts_see_every_module():
    """Also those behind the links of the import root."""
    modules = set()
    for folder, _, names in os.walk(PACKAGE, followlinks=True):
        package = (PACKAGE.name, *Path(folder).relative_to(PACKAGE).parts)
        modules |= {".".join((*package, name.removesuffix(".py"))) for name in names if name.endswith(".py")}
    assert grimp.build_graph("via_sd", cache_dir=None).modules == {name.removesuffix(".__init__") for name in modules}
    assert len(modules) > 100


@pytest.mark.parametrize(
    ("module", "imported", "contract"),
    [
        ("masks/space.py", "via_sd.contract.manifest", "Packages import one way"),
        ("contract/manifest.py", "via_sd.runtime.generation.api", "Packages import one way"),
        ("runtime/engines/ort.py", "via_sd.export.passes", "Packages import one way"),
        ("export/writer/weights.py", "via_sd.tools.bench", "Packages import one way"),
        ("errors.py", "via_sd", "Packages import one way"),
        ("runtime/engines/ort.py", "via_sd.runtime.generation.policy", "Within the runtime, rooms import one way"),
        ("runtime/engines/ort.py", "torch", "The runtime needs no package that an edge box lacks"),
        ("masks/maskfile.py", "matplotlib.pyplot", "The runtime needs no package that an edge box lacks"),
        ("tools/commands/bench.py", "via_sd.tools.commands.demo", "Commands do not import each other"),
        ("tools/search/text.py", "via_sd.tools.calibration", "Within the tools, commands come last"),
        ("tools/bench/run.py", "tests.support", "What is installed imports nothing that stays in the repository"),
        ("export/passes/prune.py", "via_sd.export.tensorrt", "Within export, what deploys a bundle comes after"),
        ("masks/space.py", "via_sd.masks.search", "No cycles, neither between modules nor between packages"),
    ],
)
def test_an_import_the_wrong_way_breaks_its_contract(module, imported, contract, tmp_path):
    """Even one inside a function."""
    copy = Path(shutil.copytree(PACKAGE, tmp_path / "via_sd", ignore=shutil.ignore_patterns("__pycache__")))
    with (copy / module).open("a", encoding="utf-8") as file:
        file.write(f"\n\ndef wrong() -> None:\n    import {imported}\n")
    done = lint(tmp_path)
    assert done.returncode == 1, done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith(contract))
    assert "BROKEN" in line
