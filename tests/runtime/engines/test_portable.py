"""The portable graphs as a backend of the decoding modes: the same KV and the same text as the bundle's own graph.

Here on the CPU provider; `test_tensorrt_gpu.py` asks the same of a GPU.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from tests.support.backend_checks import check_against_the_routed_graph
from tests.support.pipelines import WatchedPipeline
from via_sd.runtime import BundleError, Pipeline, load_bundle
from via_sd.runtime.engines.device_rows import DeviceRow
from via_sd.runtime.engines.portable import GraphEngine, load_graphs

pytest.importorskip("tensorrt_rtx", reason="needs the tensorrt-rtx extra")

TARGET = "tensorrt-rtx"


@pytest.fixture(scope="module")
def built(tiny_bundle_model_drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from via_sd.export.tensorrt import build_engines

    bundle = tmp_path_factory.mktemp("built") / "bundle"
    shutil.copytree(tiny_bundle_model_drafter, bundle)
    build_engines(bundle, dtype="fp32", tokens=(1, 4, 24), prefill=(1, 32, 64), compute_capabilities=["8.9"])
    return bundle


@pytest.fixture(scope="module")
def pipeline(built: Path) -> Pipeline:
    return Pipeline.load(built, backend="portable-cpu", threads=1, max_sequences=2)


def test_logits_equal_the_routed_graph_after_any_sequence_of_passes_and_rollbacks(
    pipeline: Pipeline, tiny_pipelines: dict[str, WatchedPipeline]
) -> None:
    assert pipeline.verifier.tiers == ("full", "slim")
    check_against_the_routed_graph(pipeline.verifier, tiny_pipelines["model"].verifier)


@pytest.mark.parametrize("mode", ["plain", "speculative", "cascade", "routed"])
def test_every_mode_gives_the_text_it_gives_on_the_routed_graph(mode, pipeline, tiny_pipelines):
    options = {"mode": mode, "max_new_tokens": 48, "ignore_eos": True, "raw": True}
    for prompt in ("the thing in the end", "abc abc abc"):
        found, wanted = (p.generate(prompt, **options) for p in (pipeline, tiny_pipelines["model"]))
        assert found.token_ids == wanted.token_ids
        assert found.tiers == wanted.tiers


@pytest.mark.parametrize("mode", ["plain", "speculative", "cascade", "routed"])
def test_greedy_decoding_and_the_router_never_ask_for_whole_rows(mode, pipeline, monkeypatch):
    """Also not for the log-probability of what was emitted, which is the best token or the one a row was to judge.

    This drafter, which learned nothing, likes its padding, and that takes a row to mend; nobody else's is asked for.
    """
    assert pipeline.verifier.vocab_size != pipeline.drafter.vocab_size
    widths, logits = set(), DeviceRow.logits.fget

    def watched(row: DeviceRow) -> np.ndarray:
        widths.add(len(logits(row)))
        return logits(row)

    monkeypatch.setattr(DeviceRow, "logits", property(watched))
    pipeline.generate("abc abc abc", mode=mode, max_new_tokens=48, ignore_eos=True, raw=True, logprobs=0)
    assert widths <= {pipeline.drafter.vocab_size}
    pipeline.generate("abc abc abc", mode=mode, max_new_tokens=8, raw=True, logprobs=1)
    assert pipeline.verifier.vocab_size in widths


def test_sampled_text_is_that_of_the_routed_graph(pipeline, tiny_pipelines):
    options = {"mode": "speculative", "temperature": 0.8, "top_p": 0.9, "seed": 3, "max_new_tokens": 48, "raw": True}
    found, wanted = (p.generate("abc abc", **options) for p in (pipeline, tiny_pipelines["model"]))
    assert found.token_ids == wanted.token_ids


def test_weights_are_held_once_by_all_sessions_of_a_model(pipeline):
    """Every session got the same values; none of them read the file for itself."""
    engine = pipeline.verifier
    full = {value.name for value in engine.sessions["full"].get_inputs()}
    assert not full & set(engine._weights)  # they are initializers, not something a step has to feed
    addresses = [value.data_ptr() for value in engine._weights.values()]
    assert len(set(addresses)) == len(addresses)
    spans = sorted((value.data_ptr(), value.tensor_size_in_bytes()) for value in engine._weights.values())
    assert spans[-1][0] + spans[-1][1] - spans[0][0] < 2 * sum(size for _, size in spans)  # one mapped file


def owning(engine: GraphEngine, array: np.ndarray) -> Any:
    """`array` in memory that ONNX Runtime owns, as what it copies to a GPU is."""
    value = ort.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype, engine.device, engine.ordinal)
    value.update_inplace(np.ascontiguousarray(array))
    return value


def test_sessions_take_weights_and_kv_buffers_that_onnx_runtime_owns_as_on_a_gpu(built, tiny_pipelines, monkeypatch):
    monkeypatch.setattr(GraphEngine, "value", owning)
    pipeline = Pipeline.load(built, backend="portable-cpu", threads=1, max_sequences=1, retained_slots=0)
    options = {"mode": "cascade", "max_new_tokens": 24, "ignore_eos": True, "raw": True}
    found, wanted = (p.generate("abc abc abc", **options) for p in (pipeline, tiny_pipelines["model"]))
    assert found.token_ids == wanted.token_ids


@pytest.mark.parametrize(
    ("provider", "message"),
    [
        ("rocm", "providers are cpu, cuda, tensorrt, nv-tensorrt-rtx"),
        ("cuda", "has no CUDAExecutionProvider"),
        ("nv-tensorrt-rtx", r"via-sd-export\[nv-tensorrt-rtx\]"),
    ],
)
def test_a_provider_that_is_not_there_is_named(provider, message, built):
    with pytest.raises(BundleError, match=message):
        load_graphs(load_bundle(built), TARGET, provider)


def test_an_unknown_backend_is_refused_with_those_there_are(built):
    with pytest.raises(
        BundleError, match=r"'gpu' is not known; backends are onnxruntime, tensorrt-rtx, tensorrt, portable"
    ):
        Pipeline.load(built, backend="gpu")


def test_graphs_that_were_not_built_are_asked_for_with_the_command(tiny_bundle):
    with pytest.raises(BundleError, match=r"via-sd-export build .* --target tensorrt-rtx"):
        Pipeline.load(tiny_bundle, backend="portable-cpu")


def test_bfloat16_graphs_are_refused_with_the_dtype_to_build(built, tmp_path):
    from via_sd.export.tensorrt import build_engines

    bundle = Path(shutil.copytree(built, tmp_path / "bf16"))
    build_engines(bundle, dtype="bf16", compute_capabilities=["8.9"])
    with pytest.raises(BundleError, match=r"bfloat16.*--dtype fp16"):
        load_graphs(load_bundle(bundle), TARGET, "cpu")
