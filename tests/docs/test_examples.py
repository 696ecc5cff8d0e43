"""Every script in examples/ does what its docstring says, on the tiny model."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.documents import blocks, read
from tests.support.tritonserver import TritonServer
from via_sd.export.triton import ServingOptions, write_repository
from via_sd.runtime import load_bundle
from via_sd.runtime.generation.policy_file import FOLDER

EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
TESTED = {
    "generate_and_stream.py",
    "routed_with_a_limit.py",
    "export_with_a_mask.py",
    "search_to_bundle.py",
    "triton_client.py",
}

Example = Callable[..., str]


@pytest.fixture
def example(clone_with_bundle: Path, environment: dict[str, str]) -> Example:
    """Runs a script in the folder; what it printed."""

    def run(name: str, *arguments: object) -> str:
        command = [sys.executable, ROOT / "examples" / name, *map(str, arguments)]
        done = subprocess.run(
            command, cwd=clone_with_bundle, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_every_example_is_tested_here_and_shown_in_the_documentation():
    assert set(EXAMPLES) == TESTED
    shown = [block.language for block in blocks("docs/examples.md")]
    assert shown == ["{literalinclude}"] * len(EXAMPLES)
    for name in EXAMPLES:
        assert f"../examples/{name}" in read("docs/examples.md")
        assert name in (ast.get_docstring(ast.parse((ROOT / "examples" / name).read_text())) or "")


def test_generate_and_stream(example):
    printed = example("generate_and_stream.py", "bundle")
    assert "ended by" in printed
    assert printed.splitlines()[-1] in ("stop", "length")


def test_routed_with_a_limit(example):
    printed = example("routed_with_a_limit.py", "bundle")
    assert "tokens accepted by slim alone were checked" in printed


def test_export_with_a_mask(example, clone_with_bundle):
    printed = example("export_with_a_mask.py", "model", "masked", 2, 3)
    assert "slim skips 33% of the sublayers" in printed
    (mask,) = load_bundle(clone_with_bundle / "masked").masks.values()
    assert [layer for layer, keep in enumerate(mask.keep_mlp) if not keep] == [2, 3]


def test_search_to_bundle(example, clone_with_bundle):
    printed = example("search_to_bundle.py", "model", "prompts.jsonl", "found", 0.34, 8)
    assert "auto is " in printed
    (mask,) = load_bundle(clone_with_bundle / "found").masks.values()
    assert mask.keep_mlp.count(False) == 2
    assert len(list((clone_with_bundle / "found" / FOLDER).glob("*.json"))) == 1


@pytest.mark.server
def test_triton_client(example, tiny_bundle, tmp_path_factory):
    repository = tmp_path_factory.mktemp("repository")
    write_repository(tiny_bundle, repository, options=ServingOptions(threads=1))
    with TritonServer(repository) as server:
        printed = example("triton_client.py", server.grpc_url, "Why is the sky blue?")
    text, _, reason = printed.rstrip("\n").rpartition("\nended by ")
    assert text
    assert reason in ("stop", "length")
