"""What the README tells a reader to type works as it stands."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    """Contents of the fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str = README) -> list[str]:
    """Lines of the shell blocks, without comments."""
    lines = [line.split("  #")[0].strip() for block in blocks("sh", text) for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def folder(tiny_checkpoint, tmp_path_factory) -> Path:
    """What the README asks for: a checkpoint in `model`, and its own example of a mask in `slim.json`."""
    path = tmp_path_factory.mktemp("readme")
    (path / "model").symlink_to(tiny_checkpoint)
    (path / "slim.json").write_text(blocks("json")[0])
    (path / "prompts.jsonl").symlink_to(ROOT / "tests/prompts.jsonl")
    return path


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The console script that was installed with the package under test comes first."""
    return {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def test_every_command_is_of_a_kind_that_is_tested():
    for line in commands():
        assert re.match(r"make |pip install |via-sd-export ", line), line


def test_the_commands_run_in_the_order_a_reader_meets_them(folder, environment):
    lines = [line for line in commands() if line.startswith("via-sd-export ")]
    verbs = {shlex.split(line)[1] for line in lines}
    assert verbs >= {"export", "search", "inspect", "generate", "calibrate", "bench", "validate", "build", "triton"}
    for line in lines:
        if shlex.split(line)[1] == "build" and importlib.util.find_spec("tensorrt_rtx") is None:
            continue  # an extra of its own, of more than a gigabyte
        done = subprocess.run(
            ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        if shlex.split(line)[1] not in ("export", "search", "triton"):  # what they make is files
            assert done.stdout.strip(), line
    assert (folder / "bundle" / "bundle.json").is_file()


def test_the_python_examples_run(folder, environment):
    """After the commands: they load the bundle that those made."""
    assert (folder / "bundle").is_dir(), "needs the bundle of the test before it"
    examples = blocks("python")
    assert len(examples) >= 2
    for code in examples:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{code}\n{done.stderr}"


def test_the_extras_to_install_exist():
    known = set(metadata("via-sd-export").get_all("Provides-Extra") or [])
    table = README.split("| extra |")[1].split("\n\n")[0]
    first_column = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for cell in first_column for name in re.findall(r"`([a-z-]+)`", cell)} == known
    for line in commands():
        if line.startswith("pip install "):
            extras = re.search(r"\[(.*)\]", line)
            assert extras
            assert set(extras.group(1).split(",")) <= known


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_the_make_targets_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*(?: [a-z-]+)*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    known = {name for entry in targets for name in entry.split()}
    asked = {
        target
        for line in commands(text)
        if line.startswith("make ")
        for target in line.removeprefix("make ").split(" #")[0].split()
    }
    assert asked
    assert asked <= known


@pytest.mark.parametrize(
    "document",
    ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))],
)
def test_links_within_the_project_lead_somewhere(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        if "://" not in target:
            assert ((ROOT / document).parent / target).exists(), target


def test_the_modules_to_measure_with_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for module in re.findall(r"python -m (via_sd[\w.]+)", text):
        done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{module}: {done.stderr}"
