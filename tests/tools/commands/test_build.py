"""`build` and the GPU check at the terminal, as far as they go without a GPU: engines are built, graphs are run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from tests.support.command_line import refused
from via_sd.runtime.engines.trust import built_here
from via_sd.tools.commands.build import build
from via_sd.tools.commands.gpu_check import LIMITS, gpu_check
from via_sd.tools.commands.inspect import inspect
from via_sd.tools.prediction.latency import SIZES

pytest.importorskip("tensorrt_rtx", reason="needs the tensorrt-rtx extra")


def invoke(command: Any, *arguments: object) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def test_build_prints_what_it_made_and_notes_that_it_was_made_here(bundle):
    first = invoke(build, bundle, "--dtype", "fp16", "--compute-capability", "8.9", "--json")
    assert first.exit_code == 0, first.stderr
    facts = json.loads(first.stdout)
    assert list(facts["engines"]) == ["full", "slim"]
    assert all(engine["built"] for engine in facts["engines"].values())
    folder = bundle / "engines/tensorrt-rtx"
    assert facts["weights_bytes"] == (folder / "weights.data").stat().st_size
    files = json.loads((folder / "engines.json").read_text())["files"]
    assert built_here() == {files[f"{name}.plan"]["sha256"] for name in ("full", "slim")}
    again = invoke(build, bundle, "--dtype", "fp16", "--compute-capability", "8.9")
    assert again.exit_code == 0
    assert again.stdout.count("unchanged") == 2
    assert "built, not run" in " ".join(again.stdout.split())
    shown = json.loads(invoke(inspect, folder, "--json").stdout)
    assert (shown["kind"], shown["target"], shown["dtype"]) == ("engines", "tensorrt-rtx", "fp16")
    assert shown["compute_capabilities"] == ["8.9"]
    assert {name: engine["bytes"] for name, engine in shown["engines"].items()} == {
        name: (folder / f"{name}.plan").stat().st_size for name in ("full", "slim")
    }
    one = json.loads(invoke(inspect, folder / "slim.plan", "--json").stdout)
    assert one["engines"] == {"slim": shown["engines"]["slim"]}
    assert json.loads(invoke(inspect, bundle, "--json").stdout)["engines"] == ["tensorrt-rtx"]
    (folder / "other.plan").touch()
    refused(invoke(inspect, folder / "other.plan"), "engines.json does not list other.plan")
    (folder / "engines.json").write_text("{}")
    refused(invoke(inspect, folder), "is None version None, this release reads via-sd-engines 3")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tokens", "1,b"], "--tokens is '1,b', wanted three numbers: MIN,OPT,MAX"),
        (["--tokens", "8,4,16"], "verify step are 8,4,16"),
        (["--prefill", "1,2,100000"], "the capacity of the KV buffers"),
        (["--compute-capability", "9.0"], "no kernels for compute capability 9.0"),
        (["--target", "tensorrt"], "pip install 'via-sd-export[tensorrt]'"),
        (["--reference", "/nowhere"], "/nowhere does not exist"),
    ],
)
def test_bad_options_are_one_message_and_leave_nothing(options, says, bundle, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", None)
    refused(invoke(build, bundle, *options), says)
    assert not list((bundle / "engines").glob("*"))


def test_a_damaged_bundle_is_refused(bundle, tmp_path):
    (bundle / "verifier/weights.data").write_bytes(b"short")
    refused(invoke(build, bundle), "weights.data has 5 bytes")
    refused(invoke(build, tmp_path / "nowhere"), "is no bundle")


def test_weights_behind_a_hard_link_are_refused_in_our_words(bundle, tmp_path):
    os.link(bundle / "verifier/weights.data", tmp_path / "another-name")
    refused(invoke(build, bundle), "weights.data is a link, or another name links to the same file")


def on_the_cpu(bundle: Path, *options: str) -> Result:
    return invoke(
        gpu_check, bundle, "--backend", "portable-cpu", "--dtype", "fp32", "--max-new-tokens", "8", "--repeats", "1",
        *options,
    )  # fmt: skip


def test_the_gpu_check_goes_its_whole_way_on_the_cpu(bundle):
    result = on_the_cpu(bundle, "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert list(facts["tiers"]) == ["full", "slim"]
    for tier in facts["tiers"].values():
        assert tier["mean_kl"] < 1e-6
        assert list(tier["step_ms"]) == [str(size) for size in SIZES]
    assert list(facts["modes"]) == ["plain", "speculative", "cascade", "routed"]
    shown = on_the_cpu(bundle).stdout
    assert "tier slim" in shown
    assert "mode routed" in shown


def test_the_gpu_check_fails_when_a_tier_computes_something_else(bundle, monkeypatch):
    monkeypatch.setitem(LIMITS, "fp32", -1.0)
    result = on_the_cpu(bundle, "--json")
    assert result.exit_code == 1
    assert "tiers full, slim are further than -1 nats" in result.stderr


def test_the_gpu_check_names_the_backends_there_are(bundle):
    refused(invoke(gpu_check, bundle, "--backend", "rocm"), "'rocm', wanted auto, tensorrt-rtx, tensorrt, portable-cpu")
