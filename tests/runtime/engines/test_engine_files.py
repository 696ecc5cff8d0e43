"""Engines are checked before any is deserialised; every mismatch is named with the command that builds them again."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from via_sd.runtime import BundleError, load_bundle
from via_sd.runtime.engines.tensorrt import EngineFiles, Host, check_host, load_engines, read_engine_files, record_built
from via_sd.runtime.engines.trust import built_here, record_file

pytest.importorskip("tensorrt_rtx", reason="needs the tensorrt-rtx extra")

TARGET = "tensorrt-rtx"
FOLDER = Path("engines") / TARGET


@pytest.fixture(scope="module")
def built(tiny_bundle_model_drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with engines."""
    from via_sd.export.tensorrt import build_engines

    bundle = tmp_path_factory.mktemp("built") / "bundle"
    shutil.copytree(tiny_bundle_model_drafter, bundle)
    build_engines(bundle, dtype="fp16", tokens=(1, 4, 32), compute_capabilities=["8.6", "8.9"])
    return bundle


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty list of the plans that were built here."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def read(bundle: Path, **options: bool) -> EngineFiles:
    return read_engine_files(load_bundle(bundle), TARGET, **{"trust": True, **options})


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def edit_engines(bundle: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change engines.json as a build would have: the bundle's manifest names what it became."""
    file = bundle / FOLDER / "engines.json"
    edit(file, change)
    content = file.read_bytes()
    entry = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    edit(bundle / "bundle.json", lambda manifest: manifest["engines"][TARGET].update(entry))


def host(files: EngineFiles, **changes: str) -> Host:
    fits = Host(files.request["library"]["name"], files.request["library"]["version"], "RTX 4090", "8.9")
    return replace(fits, **changes)


def test_engines_that_fit_are_read_with_their_tiers_in_order_of_rank(built):
    files = read(built)
    assert files.engines_of("verifier") == ["full", "slim"]
    assert files.engines_of("drafter") == ["drafter"]
    check_host(files, host(files))


def test_a_bundle_without_engines_says_how_to_build_them(tiny_bundle):
    with pytest.raises(BundleError, match=rf"no engines for {TARGET}; .*via-sd-export build .* --target {TARGET}"):
        read_engine_files(load_bundle(tiny_bundle), TARGET)


def test_a_manifest_that_is_gone_or_changed_is_refused(copy):
    edit(copy / FOLDER / "engines.json", lambda manifest: manifest["request"].update(compute_capabilities=["9.0"]))
    with pytest.raises(BundleError, match=r"engines\.json is not the one the bundle names; build"):
        read(copy)
    (copy / FOLDER / "engines.json").unlink()
    with pytest.raises(BundleError, match=r"engines\.json is missing; build"):
        read(copy)


def test_a_manifest_of_another_version_is_refused(copy):
    edit_engines(copy, lambda manifest: manifest.update(version=99))
    with pytest.raises(BundleError, match=r"version 99, this release reads via-sd-engines 3; build"):
        read(copy)


@pytest.mark.parametrize("name", ["full.plan", "weights.data", "drafter.plan"])
def test_a_damaged_or_missing_file_is_named_with_the_command_that_makes_it(name, copy):
    file = copy / FOLDER / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(BundleError, match=rf"{name} is missing or damaged; .*via-sd-export build {copy} --target"):
        read(copy)
    read(copy, verify=False)  # its size is right
    file.unlink()
    with pytest.raises(BundleError, match=rf"{name} is missing or damaged"):
        read(copy, verify=False)


def test_engines_made_from_other_weights_are_refused(copy):
    def other(manifest: dict[str, Any]) -> None:
        manifest["request"]["source"]["verifier/weights.data"] = "0" * 64

    edit_engines(copy, other)
    with pytest.raises(BundleError, match=r"made from another verifier/weights\.data than this bundle has; build"):
        read(copy)


def test_a_plan_that_was_not_built_here_is_run_by_those_only_who_trust_it(copy):
    with pytest.raises(
        BundleError, match=r"full\.plan was not built on this machine.*via-sd-export build.*--trust-engines"
    ):
        read(copy, trust=False)
    plans = {
        name: hashlib.sha256((copy / FOLDER / f"{name}.plan").read_bytes()).hexdigest() for name in ("full", "slim")
    }
    record_built(plans.values())
    with pytest.raises(BundleError, match=r"drafter\.plan was not built"):
        read(copy, trust=False)
    record_built([hashlib.sha256((copy / FOLDER / "drafter.plan").read_bytes()).hexdigest()])
    read(copy, trust=False)
    assert len(record_file().read_text().splitlines()) == len(built_here()) == 3


def test_a_forged_manifest_does_not_make_a_plan_trusted(copy):
    genuine = (copy / FOLDER / "full.plan").read_bytes()
    record_built(
        hashlib.sha256((copy / FOLDER / f"{n}.plan").read_bytes()).hexdigest() for n in ("full", "slim", "drafter")
    )
    (copy / FOLDER / "full.plan").write_bytes(genuine[:-1] + bytes([genuine[-1] ^ 1]))
    from via_sd.files import fast_hash

    def forge(manifest: dict[str, Any]) -> None:
        manifest["files"]["full.plan"]["xxh3"] = fast_hash(copy / FOLDER / "full.plan")
        manifest["files"]["full.plan"]["sha256"] = hashlib.sha256(genuine).hexdigest()

    edit_engines(copy, forge)
    with pytest.raises(BundleError, match=r"full\.plan was not built on this machine"):
        read(copy, trust=False)


def test_building_keeps_no_plan_that_came_from_elsewhere(copy):
    """Else `build`, which the refusal asks for, would find nothing to do."""
    from via_sd.export.tensorrt import build_engines

    options: dict[str, Any] = {"dtype": "fp16", "tokens": (1, 4, 32), "compute_capabilities": ["8.6", "8.9"]}
    assert build_engines(copy, **options).built == {}
    result = build_engines(copy, **options, trusted=built_here())
    assert set(result.built) == {"full", "slim", "drafter"}
    record_built(result.manifest["files"][f"{name}.plan"]["sha256"] for name in result.built)
    read(copy, trust=False)
    assert build_engines(copy, **options, trusted=built_here()).built == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "1.7.2.0"}, r"built with tensorrt_rtx .*, installed is tensorrt_rtx 1\.7\.2\.0; build"),
        ({"library": "tensorrt"}, r"built with tensorrt_rtx .*, installed is tensorrt "),
        (
            {"compute_capability": "9.0", "device": "H200"},
            r"for compute capabilities 8\.6, 8\.9, H200 has 9\.0; .* --compute-capability 9\.0$",
        ),
    ],
)
def test_engines_for_another_library_or_gpu_are_refused_before_they_are_read(changes, message, built):
    files = read(built)
    with pytest.raises(BundleError, match=message) as refusal:
        check_host(files, host(files, **changes))
    assert f"via-sd-export build {built} --target {TARGET} --dtype fp16 --tokens 1,4,32" in str(refusal.value)


def test_engines_of_another_platform_are_refused(copy):
    edit_engines(copy, lambda manifest: manifest["request"].update(platform="windows-arm64"))
    files = read(copy)
    with pytest.raises(BundleError, match=rf"are for windows-arm64, this is {platform.system().lower()}-"):
        check_host(files, host(files))


def test_version_compatible_engines_run_in_later_versions_of_their_major_only(copy):
    edit_engines(copy, lambda manifest: manifest["request"].update(version_compatible=True))
    files = read(copy)
    major, minor = files.request["library"]["version"].split(".")[:2]
    check_host(files, host(files, version=f"{major}.{int(minor) + 1}.0"))
    for version in (f"{major}.{int(minor) - 1}.9", f"{int(major) + 1}.0.0"):
        with pytest.raises(BundleError, match="build them again"):
            check_host(files, host(files, version=version))


def has_gpu() -> bool:
    from via_sd.runtime.engines.tensorrt.cuda import Cuda

    try:
        return bool(Cuda().name)
    except BundleError:
        return False


def test_a_machine_without_a_gpu_is_told_so(built):
    if has_gpu():
        pytest.skip("there is a GPU")
    with pytest.raises(BundleError, match=r"engines (run on an NVIDIA GPU|need the Python package cuda-bindings)"):
        load_engines(load_bundle(built), TARGET, trust=True)


def test_an_unknown_target_is_refused(built):
    with pytest.raises(BundleError, match=r"targets are tensorrt-rtx, tensorrt"):
        load_engines(load_bundle(built), "tensorrt-llm")
