"""All commands: usage, help, version, and one message for bundles and libraries that are missing or damaged."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import invoke, refused, run_script


@pytest.fixture
def damaged(tiny_bundle, tmp_path) -> Path:
    """A copy of the bundle that a test may damage."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def test_a_bundle_that_is_not_there_is_refused(tmp_path):
    refused(run_script("generate", tmp_path / "nothing", "--prompt", "x"), "is no bundle", "via-sd-export export")
    refused(invoke("inspect", tmp_path / "nothing"), "does not exist")
    refused(invoke("inspect", tmp_path), "has no bundle.json")


def _truncate(bundle: Path) -> None:
    weights = bundle / "verifier/weights.data"
    os.truncate(weights, weights.stat().st_size - 4096)


def _flip_one_byte(bundle: Path) -> None:
    weights = bundle / "verifier/weights.data"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)


def _edit_manifest(**entries: Any) -> Callable[[Path], None]:
    def edit(bundle: Path) -> None:
        manifest = json.loads((bundle / "bundle.json").read_text())
        (bundle / "bundle.json").write_text(json.dumps({**manifest, **entries}))

    return edit


DAMAGES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "truncated weights": (_truncate, ["weights.data has", "wanted", "damaged"]),
    "one changed byte in the weights": (_flip_one_byte, ["weights.data is changed", "XXH3"]),
    "missing weights": (lambda b: (b / "verifier/weights.data").unlink(), ["weights.data is missing"]),
    "missing graph": (lambda b: (b / "verifier/model.onnx").unlink(), ["model.onnx is missing"]),
    "changed graph": (lambda b: (b / "verifier/slim.onnx").write_bytes(b"onnx"), ["slim.onnx has 4 bytes"]),
    "changed tokenizer": (lambda b: (b / "tokenizer.json").write_text("{}"), ["tokenizer.json has 2 bytes"]),
    "manifest cut short": (lambda b: os.truncate(b / "bundle.json", 900), ["bundle.json is corrupt"]),
    "empty manifest": (lambda b: os.truncate(b / "bundle.json", 0), ["bundle.json is corrupt"]),
    "manifest that is no text": (lambda b: (b / "bundle.json").write_bytes(b"\xff\xfe"), ["bundle.json is corrupt"]),
    "manifest of something else": (_edit_manifest(format="recipe"), ["is not a manifest of format via-sd-bundle"]),
    "manifest of the future": (_edit_manifest(version=99), ["bundle version 99", "reads 2"]),
    "manifest without files": (lambda b: (b / "bundle.json").write_text('{"format": "via-sd-bundle", "version": 2}'),
                               ["model is missing"]),
    "missing manifest": (lambda b: (b / "bundle.json").unlink(), ["has no bundle.json"]),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_bundle_is_refused_by_every_command_that_reads_it(damage, damaged):
    inflict, says = DAMAGES[damage]
    inflict(damaged)
    refused(invoke("generate", damaged, "--prompt", "x"), *says)
    refused(invoke("inspect", damaged, "--json"), *says)


def test_the_script_shows_no_traceback_either(damaged):
    _flip_one_byte(damaged)
    refused(run_script("generate", damaged, "--prompt", "x"), "weights.data is changed")


@pytest.mark.parametrize(
    "arguments",
    [
        ["export"],
        ["export", "model"],
        ["export", "model", "--out", "b", "--precision", "fp8"],
        ["export", "model", "--out", "b", "--max-seq-len", "many"],
        ["generate", "bundle", "--prompt", "x", "--temperature", "hot"],
        ["inspect"],
        ["inspect", "bundle", "--nonsense"],
        ["no-such-verb"],
    ],
)
def test_bad_usage_is_exit_code_2_and_says_what_was_wrong(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage: " in result.stderr
    assert "Traceback" not in result.stderr


def test_help_names_every_verb_and_every_verb_has_help():
    text = run_script("--help").stdout
    for verb in ("export", "generate", "bench", "inspect", "demo"):
        assert verb in text
        shown = invoke(verb, "--help")
        assert shown.exit_code == 0
        assert "Usage:" in shown.stdout


def test_the_version_is_that_of_the_package():
    result = run_script("--version")
    assert (result.returncode, result.stdout) == (0, f"via-sd-export {version('via-sd-export')}\n")


def test_a_library_of_an_extra_that_is_not_installed_is_one_message(tiny_bundle, monkeypatch):
    for imported in ("via_sd.export.sources.checkpoint", "via_sd.tools.validation.run"):
        monkeypatch.delitem(sys.modules, imported, raising=False)
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    message = "this needs onnx_ir, which is not installed: pip install 'via-sd-export[export]'"
    refused(invoke("validate", tiny_bundle, "--reference", "nowhere"), message)
