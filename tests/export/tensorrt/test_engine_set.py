"""A set of engines: what a build leaves in the bundle, what it does not do twice, what it refuses (no GPU needed)."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from via_sd.errors import BundleError
from via_sd.export import ExportError, export_bundle
from via_sd.export.tensorrt import TARGETS, build_engines, builder
from via_sd.export.tensorrt.library import Library, load_library
from via_sd.export.tensorrt.log import BuildLog
from via_sd.export.tensorrt.network import Network, parse_network
from via_sd.export.tensorrt.profiles import plan_profiles
from via_sd.runtime import load_bundle

pytest.importorskip("tensorrt_rtx", reason="needs the tensorrt-rtx extra")

FOLDER = Path("engines/tensorrt-rtx")
ENGINES = ("full", "slim", "drafter")


@pytest.fixture(scope="module")
def built(tiny_bundle_model_drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with engines for full, slim and a model drafter; copy it to change it."""
    bundle = tmp_path_factory.mktemp("built") / "bundle"
    shutil.copytree(tiny_bundle_model_drafter, bundle)
    build_engines(bundle, dtype="fp16")
    return bundle


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    return lambda bundle: Path(shutil.copytree(bundle, tmp_path / "copy"))


def engines_json(bundle: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((bundle / FOLDER / "engines.json").read_text(encoding="utf-8"))
    return data


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def test_a_build_leaves_a_graph_and_a_plan_for_every_tier_and_one_weights_file(built):
    names = {path.name for path in (built / FOLDER).iterdir()}
    wanted = {f"{engine}.{kind}" for engine in ENGINES for kind in ("onnx", "plan")}
    assert names == wanted | {"weights.data", "engines.json", "build.log"}
    assert [p.name for p in (built / "engines").iterdir()] == ["tensorrt-rtx"]
    assert "tensorrt_rtx" in (built / FOLDER / "build.log").read_text().splitlines()[0]


def test_the_manifest_says_what_the_engines_were_made_from_and_for(built):
    import tensorrt_rtx

    manifest = engines_json(built)
    request = manifest["request"]
    assert request["library"] == {"name": "tensorrt_rtx", "version": tensorrt_rtx.__version__}
    assert request["compute_capabilities"] == ["8.0", "8.6", "8.9", "12.0", "12.1"]
    assert request["profiles"]["verifier"] == [
        {"name": "any", "tokens": [1, 8, 256], "rows": [1, 8, 96], "visible": [1, 256, 256]}
    ]
    files = json.loads((built / "bundle.json").read_text())["files"]
    assert request["source"] == {
        f"{model}/{name}": files[f"{model}/{name}"]["sha256"]
        for model in ("verifier", "drafter")
        for name in ("model.onnx", "weights.data")
    }
    for name, wanted in manifest["files"].items():
        content = (built / FOLDER / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (wanted["size"], wanted["sha256"])
    assert {name: entry["model"] for name, entry in manifest["engines"].items()} == {
        "full": "verifier", "slim": "verifier", "drafter": "drafter",
    }  # fmt: skip
    assert manifest["kv"]["verifier"]["dtype"] == "float16"


def test_the_bundle_names_its_engines_and_loads_as_before(built):
    bundle = load_bundle(built)
    entry = bundle.manifest["engines"]["tensorrt-rtx"]
    content = (built / entry["manifest"]).read_bytes()
    assert (len(content), hashlib.sha256(content).hexdigest()) == (entry["size"], entry["sha256"])
    shutil.copytree(built, built.with_name("without"))
    shutil.rmtree(built.with_name("without") / "engines")
    load_bundle(built.with_name("without"))  # engines are an addition: a bundle is whole without them


def test_the_weights_file_holds_every_tensor_once_aligned_and_as_the_graphs_say(built):
    manifest = engines_json(built)
    data = (built / FOLDER / "weights.data").read_bytes()
    tensors = [t for model in ("verifier", "drafter") for t in manifest["weights"]["tensors"][model]]
    spans = sorted({(t["offset"], t["offset"] + t["size"]) for t in tensors})
    assert len(spans) < len(tensors)  # verifier and drafter rotate alike
    assert len({data[start:end] for start, end in spans}) == len(spans)
    assert all(start % 4096 == 0 for start, _ in spans)
    assert all(0 <= start - end < 4096 for (_, end), (start, _) in pairwise(spans))
    assert spans[0][0] == 0
    assert spans[-1][1] == len(data)
    for engine in ENGINES:
        model = ir.load(built / FOLDER / f"{engine}.onnx")
        listed = {t["name"]: t for t in manifest["weights"]["tensors"][manifest["engines"][engine]["model"]]}
        outside = {
            n: v.const_value
            for n, v in model.graph.initializers.items()
            if isinstance(v.const_value, ir.ExternalTensor)
        }
        assert list(outside) == manifest["engines"][engine]["weights"]
        for name, tensor in outside.items():
            wanted = listed[name]
            assert (tensor.offset or 0, tensor.length, list(tensor.shape.numpy())) == (
                wanted["offset"], wanted["size"], wanted["shape"],
            )  # fmt: skip
    assert set(manifest["engines"]["slim"]["weights"]) < set(manifest["engines"]["full"]["weights"])


def test_the_graphs_run_in_onnx_runtime_as_they_lie_in_the_bundle(built):
    for engine in ENGINES:
        session = ort.InferenceSession(built / FOLDER / f"{engine}.onnx", providers=["CPUExecutionProvider"])
        feeds = {
            "input_ids": [[1, 2, 3]],
            "position_ids": [[0, 1, 2]],
            "cache_slots": [0, 1, 2],
            "logit_rows": [2],
            "candidates": [[4]],
        }
        arrays = {name: np.array(value, np.int64) for name, value in feeds.items()}
        for value in session.get_inputs():
            if value.name.startswith("past_key_values."):
                arrays[value.name] = np.zeros((1, *value.shape[1:]), np.float16)
        logits, numbers = session.run(["logits", "row_numbers"], arrays)
        assert logits.shape[:2] == (1, 1)
        assert np.isfinite(logits).all()
        assert numbers[0, 0, 0] == logits.argmax()


def test_building_again_builds_nothing_and_touches_nothing(built):
    before = {path: path.stat().st_mtime_ns for path in (built / FOLDER).iterdir()}
    result = build_engines(built, dtype="fp16")
    assert result.built == {}
    assert set(result.kept) == set(ENGINES)
    assert {path: path.stat().st_mtime_ns for path in (built / FOLDER).iterdir()} == before


def test_only_a_damaged_plan_is_built_again(built, copy_of):
    bundle = copy_of(built)
    plan = bundle / FOLDER / "slim.plan"
    plan.write_bytes(plan.read_bytes()[:-1])
    result = build_engines(bundle, dtype="fp16")
    assert list(result.built) == ["slim"]
    assert set(result.kept) == {"full", "drafter"}
    assert digests(bundle / FOLDER)["full.plan"] == digests(built / FOLDER)["full.plan"]
    assert build_engines(bundle, dtype="fp16").built == {}


@pytest.mark.parametrize(
    ("changed", "option"),
    [
        ({"dtype": "bf16"}, "--dtype bf16"),
        ({"tokens": (1, 4, 32)}, "--tokens 1,4,32"),
        ({"compute_capabilities": ["8.9"]}, "--compute-capability 8.9"),
    ],
)
def test_engines_of_other_options_are_built_and_replace_the_old_ones(changed, option, built, copy_of):
    bundle = copy_of(built)
    result = build_engines(bundle, **{"dtype": "fp16", **changed})
    assert set(result.built) == set(ENGINES)
    assert [p.name for p in (bundle / "engines").iterdir()] == ["tensorrt-rtx"]
    assert option in engines_json(bundle)["rebuild"]
    entry = load_bundle(bundle).manifest["engines"]["tensorrt-rtx"]
    assert entry["sha256"] == hashlib.sha256((bundle / entry["manifest"]).read_bytes()).hexdigest()


def test_embedded_weights_make_every_plan_carry_them(built, copy_of):
    bundle = copy_of(built)
    shared = {name: entry["size"] for name, entry in engines_json(built)["files"].items()}
    build_engines(bundle, dtype="fp16", embed_weights=True)
    manifest = engines_json(bundle)
    for engine in ENGINES:
        assert manifest["engines"][engine]["weights"] == []
    verifier = sum(tensor["size"] for tensor in manifest["weights"]["tensors"]["verifier"])
    assert manifest["files"]["full.plan"]["size"] > 0.9 * verifier
    assert "--embed-weights" in manifest["rebuild"]
    assert shared["weights.data"] == manifest["files"]["weights.data"]["size"]


def test_bf16_is_refused_for_a_gpu_that_has_no_arithmetic_for_it(built):
    with pytest.raises(ExportError, match=r"7\.5 has no bf16.*--dtype fp16"):
        build_engines(built, dtype="bf16", compute_capabilities=["7.5"])


def test_float32_products_are_not_rounded_to_tf32(built, monkeypatch):
    """The library's default is TF32, whose 10 bits of mantissa break the limits of float32."""
    seen: list[bool] = []

    class StopError(Exception):
        pass

    def parse(library: Library, graph: bytes | str, log: BuildLog) -> Network:
        network = parse_network(library, graph, log)

        def build(definition: Any, config: Any) -> None:
            seen.append(config.get_flag(library.module.BuilderFlag.TF32))
            raise StopError

        fake = SimpleNamespace(
            create_builder_config=network.builder.create_builder_config,
            create_optimization_profile=network.builder.create_optimization_profile,
            build_serialized_network=build,
        )
        return replace(network, builder=fake)

    monkeypatch.setattr(builder, "parse_network", parse)
    options = builder.BuildOptions(plan_profiles(None, None, 256, separate=False), ["8.9"])
    with pytest.raises(StopError):
        builder.build_plan(load_library("tensorrt-rtx"), str(built / FOLDER / "full.onnx"), options, BuildLog())
    assert seen == [False]


def test_a_version_compatible_plan_builds(built, copy_of):
    bundle = copy_of(built)
    assert set(build_engines(bundle, dtype="fp16", version_compatible=True).built) == set(ENGINES)
    assert engines_json(bundle)["request"]["version_compatible"] is True


@pytest.mark.parametrize("first_time", [True, False])
def test_a_build_that_is_interrupted_leaves_the_bundle_as_it_was(first_time, built, tiny_bundle_model_drafter, copy_of):
    bundle = copy_of(tiny_bundle_model_drafter if first_time else built)
    before = {p.relative_to(bundle): p.read_bytes() for p in bundle.rglob("*") if p.is_file()}

    def interrupt(what: str, share: float | None) -> None:
        if what == "building slim" and share is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engines(bundle, dtype="bf16", progress=interrupt)
    assert {p.relative_to(bundle): p.read_bytes() for p in bundle.rglob("*") if p.is_file()} == before
    assert not list(bundle.rglob(".*"))


def test_a_quantised_bundle_is_built_from_its_checkpoint(
    tiny_checkpoint, tiny_drafter_checkpoint, tiny_masks, built, tmp_path
):
    bundle = export_bundle(
        tiny_checkpoint,
        tmp_path / "int4",
        masks=[tiny_masks[0]],
        drafter=str(tiny_drafter_checkpoint),
        precision="int4",
        max_seq_len=256,
        check=False,
    )
    with pytest.raises(ExportError, match=r"int4.*--reference"):
        build_engines(bundle)
    with pytest.raises(ExportError, match=r"drafter.*int4.*--drafter-reference"):
        build_engines(bundle, reference=tiny_checkpoint)
    with pytest.raises(ExportError, match=r"--reference .* is another model.*fingerprint"):
        build_engines(bundle, reference=tiny_drafter_checkpoint, drafter_reference=tiny_drafter_checkpoint)
    assert not (bundle / "engines").exists() or not list((bundle / "engines").iterdir())
    build_engines(bundle, dtype="fp16", reference=tiny_checkpoint, drafter_reference=tiny_drafter_checkpoint)
    assert digests(bundle / FOLDER)["weights.data"] == digests(built / FOLDER)["weights.data"]
    assert engines_json(bundle)["rebuild"].endswith("--reference CHECKPOINT --drafter-reference CHECKPOINT")


def test_a_damaged_bundle_is_not_built_from(tiny_bundle, copy_of):
    bundle = copy_of(tiny_bundle)
    weights = bundle / "verifier/weights.data"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ExportError, match=r"weights\.data is missing or damaged"):
        build_engines(bundle)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "tensorrt-llm"}, r"'tensorrt-llm' is not known; targets are tensorrt-rtx, tensorrt"),
        ({"dtype": "int4"}, r"dtype is 'int4', wanted fp32, fp16, bf16"),
        ({"tokens": (4, 2, 8)}, r"verify step are 4,2,8; wanted MIN,OPT,MAX"),
        ({"tokens": (0, 2, 8)}, r"1 <= MIN"),
        ({"tokens": (1, 8)}, r"MIN,OPT,MAX"),
        ({"prefill": (1, 256, 257)}, r"at most 256, the capacity"),
        ({"compute_capabilities": ["9.0"]}, r"no kernels for compute capability 9\.0"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(options, message, tiny_bundle):
    with pytest.raises(ExportError, match=message):
        build_engines(tiny_bundle, **options)
    assert not (tiny_bundle / "engines").exists()


def test_what_is_no_bundle_is_refused(tmp_path):
    with pytest.raises(BundleError, match=r"is no bundle: it has no bundle\.json"):
        build_engines(tmp_path)


def test_a_library_that_is_not_installed_is_named_with_the_extra(tiny_bundle, monkeypatch):
    assert TARGETS == ("tensorrt-rtx", "tensorrt")
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", None)
    with pytest.raises(ExportError, match=r"tensorrt, which does not load .*pip install 'via-sd-export\[tensorrt\]'"):
        build_engines(tiny_bundle, "tensorrt")


@pytest.mark.parametrize("capacity", [2, 8, 100, 512, 4096])
@pytest.mark.parametrize("separate", [False, True])
def test_every_corner_of_every_profile_is_a_step_that_can_be_made(capacity, separate):
    for profile in plan_profiles(None, None, capacity, separate=separate):
        for bounds in (profile.tokens, profile.rows, profile.visible):
            assert 1 <= bounds.minimum <= bounds.optimum <= bounds.maximum <= capacity
        corners = zip(profile.tokens.corners, profile.rows.corners, profile.visible.corners, strict=True)
        assert all(rows <= tokens <= visible for tokens, rows, visible in corners)
