"""Layers import one way, and the runtime runs where nothing but its own few dependencies is installed."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Modules of the import root itself, which everybody may import.
GROUND = {"errors", "files", "lazy", "progress", "version"}
#: What each package of ours may import of ours besides.
ALLOWED = {
    "masks": {"masks"},
    "contract": {"masks", "contract"},
    "export": {"masks", "contract", "export"},
    "runtime": {"masks", "contract", "runtime"},
    "tools": {"masks", "contract", "export", "runtime", "tools"},
}
#: Never imported by the runtime, not even lazily: an edge box has none of it.
HEAVY = {
    "torch", "transformers", "onnx", "onnx_ir", "onnxscript", "mobius", "safetensors", "gguf", "accelerate",
    "huggingface_hub", "optuna", "matplotlib", "scipy", "polygraphy",
}  # fmt: skip


def folder(package: str) -> Path:
    """Where the package under test lies: in the checkout, or where its wheel was installed."""
    spec = importlib.util.find_spec(f"via_sd.{package}")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def imports(package: str) -> Iterator[tuple[Path, str]]:
    """Every module imported anywhere in a package, at the top of a file or inside a function, by its full name."""
    root = folder(package)
    files = sorted(root.rglob("*.py"))
    assert files
    for file in files:
        parents = ["via_sd", package, *file.relative_to(root).parts[:-1]]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((file, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                within = parents[: len(parents) - node.level + 1] if node.level else []
                yield file, ".".join([*within, *([node.module] if node.module else [])])


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_the_layers_below_it(package):
    wrong = {
        (file.name, name)
        for file, name in imports(package)
        if name.split(".")[0] == "via_sd" and name.split(".")[1] not in ALLOWED[package] | GROUND
    }
    assert not wrong


@pytest.mark.parametrize("package", ["masks", "export", "runtime"])
def test_nobody_imports_the_tools(package):
    assert not [name for _, name in imports(package) if name.startswith("via_sd.tools")]


def test_the_runtime_names_no_package_it_must_run_without():
    assert not {(file.name, name) for file, name in imports("runtime") if name.split(".")[0] in HEAVY}


@pytest.mark.parametrize("package", ALLOWED)
def test_what_is_installed_is_all_of_the_source(package):
    """A folder that pyproject.toml forgets works in a checkout and is missing from the wheel."""
    shipped = {".py", ".typed", ".json", ".html"}

    def files(root: Path) -> set[Path]:
        found = {p.relative_to(root) for p in root.rglob("*") if p.suffix in shipped}
        return {p for p in found if p.parts[0] != "benchmarks"}  # measures this repository, and stays in it

    source = ROOT / "via_sd" / package
    assert files(folder(package)) == files(source if source.exists() else ROOT / package)


BLOCKED = """
import json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED_NAMES:
            raise ImportError(f"{name} is not installed")

BLOCKED_NAMES = set(json.loads(sys.argv[1]))
sys.meta_path.insert(0, Blocker())
"""


def run_blocked(code: str, blocked: set[str], *arguments: str) -> str:
    """Run `code` in a new interpreter in which `blocked` cannot be imported; what it prints."""
    command = [sys.executable, "-c", BLOCKED + code, json.dumps(sorted(blocked)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


GENERATE = """
from via_sd.runtime import Pipeline

pipeline = Pipeline.load(sys.argv[2])
result = {m: pipeline.generate("abc abc", mode=m, max_new_tokens=12, ignore_eos=True).token_ids
          for m in ("plain", "speculative", "cascade", "routed")}
ours = sorted(name for name in sys.modules if name.startswith(("via_sd.export", "via_sd.tools")))
print(json.dumps([result, ours]))
"""


def test_a_bundle_is_loaded_and_run_in_every_mode_without_the_heavy_packages(tiny_bundle):
    """Nor without what only the command line needs."""
    result, ours = json.loads(run_blocked(GENERATE, HEAVY | {"typer", "rich"}, str(tiny_bundle)))
    assert ours == []
    assert all(len(tokens) == 12 for tokens in result.values())
    assert result["plain"] == result["speculative"] == result["cascade"]


COMMAND = """
from via_sd.tools.commands.main import app

app(sys.argv[2:])
"""


def test_generate_and_inspect_need_no_export_packages(tiny_bundle):
    said = run_blocked(
        COMMAND, HEAVY, "generate", str(tiny_bundle), "--prompt", "abc", "--max-new-tokens", "4", "--json"
    )
    assert json.loads(said)["stats"]["emitted_tokens"] <= 4
    assert json.loads(run_blocked(COMMAND, HEAVY, "inspect", str(tiny_bundle), "--json"))["kind"] == "bundle"


def test_bad_input_is_one_message_where_nothing_can_be_exported(tmp_path):
    command = [sys.executable, "-c", BLOCKED + COMMAND, json.dumps(sorted(HEAVY)), "generate", str(tmp_path)]
    done = subprocess.run([*command, "--prompt", "x"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "is no bundle" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_mask_file_is_read_and_written_without_any_engine(tmp_path):
    code = """
from via_sd.masks.maskfile import Mask, read_mask, write_mask

write_mask(Mask.from_layers([True, False]), sys.argv[2])
print(read_mask(sys.argv[2]).keep_mlp)
"""
    assert run_blocked(code, HEAVY | {"onnxruntime"}, str(tmp_path / "mask.json")) == "(True, False)\n"


def test_an_engine_that_is_not_installed_is_named(tiny_bundle):
    code = """
from via_sd.runtime import BundleError, Pipeline

try:
    Pipeline.load(sys.argv[2])
except BundleError as error:
    print(error)
"""
    assert "pip install 'via-sd-export[cpu]'" in run_blocked(code, {"onnxruntime"}, str(tiny_bundle))


def test_exporting_without_its_packages_says_which_extra_to_install(tiny_checkpoint, tmp_path):
    code = """
from via_sd.tools.commands.main import app

app(["export", *sys.argv[2:]])
"""
    command = [sys.executable, "-c", BLOCKED + code, json.dumps(["mobius"]), str(tiny_checkpoint), "--out", "b"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "pip install 'via-sd-export[export]'" in done.stderr
    assert list(tmp_path.iterdir()) == []
