"""`validate`: right bundles pass against transformers; what computes something else fails, and is named."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import typer
from typer.testing import CliRunner, Result

from via_sd.export import export_bundle
from via_sd.files import fast_hash
from via_sd.tools.commands.validate import validate
from via_sd.tools.validation import TierReport

pytest.importorskip("polygraphy", reason="needs the polygraphy extra")


def invoke(*arguments: object) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(validate)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def facts_of(result: Result) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


@pytest.fixture
def broken(tiny_bundle: Path, tmp_path: Path) -> Callable[[str, Callable[[np.ndarray], None]], Path]:
    """A copy of the bundle with one weight changed, and a manifest that takes it for granted."""

    def make(weight: str, change: Callable[[np.ndarray], None]) -> Path:
        bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "broken"))
        tensor = ir.load(bundle / "verifier/model.onnx").graph.initializers[weight].const_value
        assert isinstance(tensor, ir.ExternalTensor)
        file = bundle / "verifier/weights.data"
        data = np.memmap(file, np.uint8, mode="r+")
        change(data[tensor.offset : tensor.offset + tensor.length].view(np.float32))
        data.flush()
        manifest = json.loads((bundle / "bundle.json").read_text())
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        manifest["files"]["verifier/weights.data"].update(xxh3=fast_hash(file), sha256=digest)
        (bundle / "bundle.json").write_text(json.dumps(manifest))
        return bundle

    return make


def projection(bundle: Path, layer: int) -> str:
    """Name of the output projection of a layer's attention."""
    names = ir.load(bundle / "verifier/model.onnx").graph.initializers
    (name,) = [name for name in names if f"layers.{layer}." in name and "o_proj" in name]
    return name


def test_every_tier_passes_with_statistics_of_every_step_and_layer(tiny_bundle, tiny_checkpoint):
    result = invoke(tiny_bundle, "--reference", tiny_checkpoint, "--json")
    assert result.exit_code == 0, result.stderr
    facts = facts_of(result)
    assert facts["passed"] is True
    full, slim = facts["models"]["verifier"]
    names = [output["name"] for output in full["outputs"]]
    assert names[:4] == ["logits of 40 at 0", "logits of 5 at 40", "logits of 1 at 45", "logits of 1 at 46"]
    assert names[4:] == [f"{part} of layer {i}" for i in range(6) for part in ("key", "value")]
    kept = [output["name"] for output in slim["outputs"] if "key" in output["name"]]
    assert kept == [f"key of layer {i}" for i in (0, 1, 4, 5)]  # a layer whose attention is skipped writes no KV
    for tier in (full, slim):
        assert tier["finite"]
        assert tier["mean_kl"] < 1e-6
        assert 0 < max(output["max_abs"] for output in tier["outputs"]) < 1e-3


def test_people_get_a_table_and_fewer_layers_on_request(tiny_bundle, tiny_checkpoint):
    shown = invoke(tiny_bundle, "--reference", tiny_checkpoint, "--layers", "2")
    assert shown.exit_code == 0, shown.stderr
    assert "logits of 5 at 40" in shown.stdout
    assert "worst of 4 keys and values" in shown.stdout
    assert "full: KL" in shown.stdout


def test_a_model_drafter_is_compared_with_its_own_checkpoint(
    tiny_bundle_model_drafter, tiny_checkpoint, tiny_drafter_checkpoint
):
    options = ("--reference", tiny_checkpoint, "--drafter-reference", tiny_drafter_checkpoint, "--json")
    facts = facts_of(invoke(tiny_bundle_model_drafter, *options))
    assert [report["tier"] for report in facts["models"]["drafter"]] == ["full"]
    assert facts["passed"] is True


def test_a_layer_that_computes_something_else_is_named_and_the_exit_code_is_1(broken, tiny_bundle, tiny_checkpoint):
    bundle = broken(projection(tiny_bundle, 1), lambda values: np.multiply(values, 1.1, out=values))
    result = invoke(bundle, "--reference", tiny_checkpoint)
    assert result.exit_code == 1
    assert "differs" in result.stdout
    (line,) = result.stderr.splitlines()
    # The attention of layer 1 still writes the right keys; what reads its output does not.
    assert line.startswith("error: not what transformers computes: full (")
    assert "first key of layer 2" in line


def test_a_nan_is_a_failure_whatever_the_tolerance(broken, tiny_bundle, tiny_checkpoint):
    def poison(values: np.ndarray) -> None:
        values[0] = np.nan

    bundle = broken(projection(tiny_bundle, 4), poison)
    result = invoke(bundle, "--reference", tiny_checkpoint, "--atol", "1e9", "--rtol", "1e9", "--json")
    assert result.exit_code == 1
    assert facts_of(result)["models"]["verifier"][0]["finite"] is False
    assert "NaN or infinity" in result.stderr
    assert not TierReport("full", finite=False, mean_kl=0.0, top1_agreement=1.0, outputs=()).passed


def test_a_tolerance_of_the_users_own_is_held_to(tiny_bundle, tiny_checkpoint):
    result = invoke(tiny_bundle, "--reference", tiny_checkpoint, "--atol", "0", "--rtol", "0", "--json")
    assert result.exit_code == 1
    assert facts_of(result)["tolerance"] == {"statistic": "elemwise", "absolute": 0.0, "relative": 0.0}


def test_a_quantised_bundle_passes_with_the_tolerance_of_its_precision(tiny_checkpoint, tiny_masks, tmp_path):
    bundle = export_bundle(tiny_checkpoint, tmp_path / "int8", masks=[tiny_masks[0]], precision="int8", check=False)
    result = invoke(bundle, "--reference", tiny_checkpoint, "--json")
    assert result.exit_code == 0, result.stderr
    assert facts_of(result)["precision"] == "int8"
    names = [output["name"] for output in facts_of(result)["models"]["verifier"][0]["outputs"]]
    assert [name for name in names if "layer" not in name] == ["logits"], "a median over one position says little"
    assert invoke(bundle, "--reference", tiny_checkpoint, "--rtol", "1e-4").exit_code == 1


def test_the_portable_graphs_beside_the_engines_are_compared_too(tiny_bundle, tiny_checkpoint, tmp_path):
    pytest.importorskip("tensorrt_rtx", reason="needs the tensorrt-rtx extra")
    from via_sd.export.tensorrt import build_engines

    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    build_engines(bundle, dtype="fp16", compute_capabilities=["8.9"])
    result = invoke(bundle, "--reference", tiny_checkpoint, "--backend", "portable-cpu", "--json")
    assert result.exit_code == 0, result.stderr
    facts = facts_of(result)
    assert facts["precision"] == "fp16"
    assert [report["tier"] for report in facts["models"]["verifier"]] == ["full", "slim"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--reference", "nowhere"], "nowhere does not exist"),
        (["--reference", "{drafter}"], "is another model than the verifier"),
        (["--reference", "{checkpoint}", "--drafter-reference", "{drafter}"], "is ngram, no model of its own"),
        (["--reference", "{checkpoint}", "--backend", "rocm"], "backends are onnxruntime, tensorrt-rtx"),
        (["--reference", "{checkpoint}", "--backend", "tensorrt-rtx"], "has no engines for tensorrt-rtx"),
    ],
)
def test_bad_input_is_one_message(options, says, tiny_bundle, tiny_checkpoint, tiny_drafter_checkpoint):
    places = {"checkpoint": tiny_checkpoint, "drafter": tiny_drafter_checkpoint}
    result = invoke(tiny_bundle, *(option.format(**places) for option in options))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert says in line


def test_polygraphy_that_is_not_installed_is_named_with_its_extra(tiny_bundle, tiny_checkpoint, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "polygraphy", None)
    result = invoke(tiny_bundle, "--reference", tiny_checkpoint)
    assert result.exit_code == 2
    assert "pip install 'via-sd-export[polygraphy]'" in result.stderr
