"""The engine's own code on a stand-in for a GPU, where the library's calls are answered by ONNX Runtime.

A figure or a claim about TensorRT never comes from here: `test_tensorrt_gpu.py` asks the same of a GPU.
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.backend_checks import assert_close, check_against_the_routed_graph
from tests.support.pipelines import WatchedPipeline
from via_sd.errors import BundleError, LogitsError
from via_sd.runtime import Pipeline, load_bundle
from via_sd.runtime.engines.engine_files import read_engine_files
from via_sd.runtime.engines.rows import logits_of
from via_sd.runtime.engines.tensorrt import launcher, load_engines
from via_sd.runtime.engines.tensorrt.cuda import _STICKY, Cuda, DeviceError, DeviceMemory
from via_sd.runtime.engines.tensorrt.engine import TensorRTEngine

pytest.importorskip("tensorrt_rtx", reason="needs the tensorrt-rtx extra")
ir = pytest.importorskip("onnx_ir", reason="needs the export extra")
pytest.importorskip("onnxruntime", reason="needs the cpu extra")

from tests.support.simulated_gpu import Driver, Library  # noqa: E402
from via_sd.export.tensorrt import build_engines  # noqa: E402
from via_sd.export.tensorrt.weights import weights_as_inputs  # noqa: E402

RTX = "tensorrt-rtx"
SIZES: dict[str, Any] = {"tokens": (1, 4, 24), "prefill": (1, 32, 64)}


@pytest.fixture(scope="module", params=[False, True], ids=["joint", "separate"])
def built(request, tiny_bundle_model_drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = tmp_path_factory.mktemp("built") / "bundle"
    shutil.copytree(tiny_bundle_model_drafter, bundle)
    build_engines(bundle, dtype="fp32", separate_profiles=request.param, compute_capabilities=["8.9"], **SIZES)
    return bundle


@dataclass
class Simulated:
    """The tiny bundle's engines on a stand-in."""

    pipeline: Pipeline
    driver: Driver
    library: Library


@pytest.fixture(params=["captured by the library", "captured by us"])
def simulated(request: Any, built: Path, monkeypatch: pytest.MonkeyPatch) -> Simulated:
    bundle = load_bundle(built)
    folder, driver = built / "engines" / RTX, Driver()
    manifest = json.loads((folder / "engines.json").read_text())
    networks, profiles = {}, {}
    for entry in manifest["engines"].values():
        plan = (folder / entry["plan"]).read_bytes()
        networks[plan] = weights_as_inputs(ir.load(folder / entry["graph"]))
        profiles[plan] = manifest["request"]["profiles"][entry["model"]]
    library = Library("tensorrt_rtx", manifest["request"]["library"]["version"], driver, networks, profiles)
    if request.param == "captured by us":
        del library.CudaGraphStrategy
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", library)
    engines = load_engines(bundle, RTX, trust=True)
    pipeline = Pipeline(bundle, *engines, max_sequences=4, retained_slots=1, slot_timeout=None)
    return Simulated(pipeline, driver, library)


def test_logits_numbers_and_kv_equal_the_routed_graph_after_any_sequence_of_passes_and_rollbacks(
    simulated: Simulated, tiny_pipelines: dict[str, WatchedPipeline]
) -> None:
    assert simulated.pipeline.verifier.tiers == ("full", "slim")
    check_against_the_routed_graph(simulated.pipeline.verifier, tiny_pipelines["model"].verifier)


@pytest.mark.parametrize("mode", ["plain", "speculative", "cascade", "routed"])
def test_every_mode_gives_the_text_it_gives_on_the_routed_graph(mode, simulated, tiny_pipelines):
    for options in ({}, {"temperature": 0.8, "seed": 5}, {"repetition_penalty": 1.3}):
        request = {"mode": mode, "max_new_tokens": 40, "ignore_eos": True, "raw": True, "logprobs": 0, **options}
        found, wanted = (p.generate("abc abc", **request) for p in (simulated.pipeline, tiny_pipelines["model"]))
        assert found.token_ids == wanted.token_ids
        assert found.tiers == wanted.tiers
        for ours, theirs in zip(found.logprobs or (), wanted.logprobs or (), strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_a_version_compatible_plan_may_run_its_code_for_the_host(simulated, tmp_path):
    files = read_engine_files(simulated.pipeline.bundle, RTX, trust=True)
    library, cuda = simulated.library, simulated.pipeline.verifier.cuda
    library.version_compatible = True
    with pytest.raises(BundleError, match="cannot be deserialised"):
        TensorRTEngine(files, "verifier", library, cuda, None)
    files.request["version_compatible"] = True
    assert TensorRTEngine(files, "verifier", library, cuda, None).tiers == ("full", "slim")


PLAIN = {"mode": "plain", "max_new_tokens": 24, "ignore_eos": True, "raw": True}


@pytest.mark.parametrize(("call", "after"), [("cuStreamEndCapture", True), ("cuGraphInstantiate", False)])
def test_a_step_that_cannot_be_captured_is_enqueued_as_before(call, after, simulated, tiny_pipelines):
    if hasattr(simulated.library, "CudaGraphStrategy"):
        pytest.skip("the library captures")
    wanted = tiny_pipelines["model"].generate("abc abc", **PLAIN).token_ids
    simulated.driver.fail(call, after=after)
    with pytest.warns(UserWarning, match=f"not kept as a CUDA graph.*{call}: CUDA_ERROR_OUT_OF_MEMORY"):
        assert simulated.pipeline.generate("abc abc", **PLAIN).token_ids == wanted
    assert simulated.driver.launches == 0  # every further token is a step of the size that failed


def test_the_graphs_that_were_used_last_are_kept(simulated, monkeypatch):
    if hasattr(simulated.library, "CudaGraphStrategy"):
        pytest.skip("the library captures")
    monkeypatch.setattr(launcher, "_MAX_GRAPHS", 2)
    buffers = simulated.pipeline.verifier.new_buffers()

    def launches_of(count: int) -> int:
        before = simulated.driver.launches
        buffers.forward("full", list(range(count)), 0, 1)
        return simulated.driver.launches - before

    for count in (1, 2, 3):
        assert [launches_of(count) for _ in range(3)] == [0, 0, 1]
    assert [launches_of(count) for count in (3, 2, 1)] == [1, 1, 0]  # the first size made room for the third
    assert len(buffers._launcher._graphs) == 2


@pytest.mark.parametrize("call", ["cuMemAlloc", "cuMemHostAlloc", "cuStreamCreate", "cuMemcpyHtoDAsync"])
def test_memory_of_a_sequence_that_could_not_be_set_up_or_run_is_freed(call, simulated):
    verifier = simulated.pipeline.verifier
    gc.collect()
    held = simulated.driver.memory.held
    simulated.driver.fail(call)
    with pytest.raises(DeviceError, match=f"{call}: CUDA_ERROR_OUT_OF_MEMORY"):
        verifier.new_buffers().forward("full", [1, 2], 0, 1)
    gc.collect()
    assert simulated.driver.memory.held == held


def test_contexts_of_all_tiers_and_sequences_share_compiled_kernels(simulated):
    if not hasattr(simulated.library, "CudaGraphStrategy"):
        pytest.skip("TensorRT proper compiles nothing where it runs")
    verifier = simulated.pipeline.verifier
    simulated.library.contexts.clear()
    for buffers in (verifier.new_buffers(), verifier.new_buffers()):
        for tier in verifier.tiers:
            buffers.forward(tier, [1, 2], 0, 1)
    found = [context.kernels for context in simulated.library.contexts]
    assert len(found) >= 4
    assert found[0] is not None
    assert all(kernels is found[0] for kernels in found)


def test_an_error_that_leaves_the_context_unusable_ends_the_pipeline(simulated):
    """The driver would answer every later call with the same error, and each request would blame its own call."""
    verifier = simulated.pipeline.verifier
    buffers = verifier.new_buffers()
    simulated.driver.fail("cuStreamSynchronize", error="CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(DeviceError, match=r"^cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS$"):
        buffers.forward("full", [1, 2], 0, 1)
    launches = simulated.driver.launches
    for call in (verifier.new_buffers, lambda: buffers.forward("full", [1, 2], 0, 1)):
        with pytest.raises(DeviceError, match="since cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS: end the process"):
            call()
    with pytest.raises(DeviceError, match="end the process and start it again"):
        simulated.pipeline.generate("abc abc", **PLAIN)
    assert simulated.driver.launches == launches


def test_errors_that_end_the_pipeline_are_the_drivers():
    driver = pytest.importorskip("cuda.bindings.driver")
    assert all(hasattr(driver.CUresult, name) for name in _STICKY)


def test_an_allocation_that_fails_does_not_end_the_pipeline(simulated):
    simulated.driver.fail("cuMemAlloc")
    with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        simulated.pipeline.verifier.new_buffers()
    assert simulated.pipeline.generate("abc abc", **PLAIN).token_ids


def test_memory_is_not_freed_while_a_step_is_recorded_but_after_it(simulated):
    """A finaliser may run on any line, that of a recording too, where a free would spoil it."""
    cuda, driver = simulated.pipeline.verifier.cuda, simulated.driver
    held = driver.memory.held
    memory = DeviceMemory(cuda, 1024)
    with cuda.lock:
        del memory
        assert driver.memory.held == held + 1024
    assert driver.memory.held == held


def test_pipelines_on_one_gpu_exclude_each_other(simulated):
    assert Cuda().lock is simulated.pipeline.verifier.cuda.lock
    assert Cuda(1).lock is not Cuda().lock


def test_pinned_memory_for_logits_is_taken_when_logits_are_asked_for(simulated, monkeypatch):
    sizes: list[int] = []
    allocate = simulated.driver.cuMemHostAlloc
    monkeypatch.setattr(
        simulated.driver, "cuMemHostAlloc", lambda size, flags: (sizes.append(size), allocate(size, flags))[1]
    )
    verifier = simulated.pipeline.verifier
    rows = verifier.new_buffers().forward("full", [1, 2], 0, 1)
    whole = verifier.planner.max_rows * verifier.vocab_size * 4
    assert whole not in sizes
    assert rows[0].logits.shape == (verifier.vocab_size,)
    assert whole in sizes


def test_a_greedy_text_brings_numbers_to_the_host_and_no_row_of_the_verifier(simulated, monkeypatch):
    verifier = simulated.pipeline.verifier
    copied, copy = [], simulated.driver.cuMemcpyDtoHAsync

    def watched(target: int, source: int, size: int, stream: int) -> Any:
        copied.append(size)
        return copy(target, source, size, stream)

    monkeypatch.setattr(simulated.driver, "cuMemcpyDtoHAsync", watched)
    simulated.pipeline.generate("abc abc", mode="plain", max_new_tokens=40, ignore_eos=True, raw=True)
    assert set(copied) == {16}
    simulated.pipeline.generate("abc abc", mode="plain", temperature=1.0, max_new_tokens=4, ignore_eos=True, raw=True)
    assert set(copied) == {16, 4 * verifier.vocab_size}


def test_a_step_that_comes_again_is_captured_by_whom_it_is_left_to(simulated):
    buffers = simulated.pipeline.verifier.new_buffers()
    tokens = list(range(40))
    buffers.forward("full", tokens, 0, 1)
    found = []
    for past in (30, 30, 30, 31, 31):  # what differs is read when the step runs, not when it was captured
        rows = buffers.forward("full", tokens[past : past + 8], past, 8)
        found.append((past, logits_of(rows)))
    for past, logits in found:
        fresh = simulated.pipeline.verifier.new_buffers()
        fresh.forward("full", tokens[:past], 0, 1)
        assert_close(logits, logits_of(fresh.forward("full", tokens[past : past + 8], past, 8)))
    by_us = not hasattr(simulated.library, "CudaGraphStrategy")
    assert simulated.driver.launches == (3 if by_us else 0)


def test_sequences_in_threads_of_their_own_do_not_disturb_each_other(simulated, tiny_pipelines):
    texts = ["abc abc", "the thing in the end", "a b c d e f", "xyz"]
    request = {"mode": "cascade", "max_new_tokens": 30, "ignore_eos": True, "raw": True}
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: simulated.pipeline.generate(text, **request).token_ids, texts))
    assert found == [tiny_pipelines["model"].generate(text, **request).token_ids for text in texts]


def test_memory_goes_with_the_objects_that_hold_it(simulated):
    memory = simulated.driver.memory
    loaded = memory.held
    buffers = simulated.pipeline.verifier.new_buffers()
    buffers.forward("slim", [1, 2, 3], 0, 3)[0].logits  # noqa: B018 - fetched, so that there is something to free
    assert memory.held > loaded
    del buffers
    gc.collect()
    assert memory.held == loaded
    simulated.pipeline = None  # type: ignore[assignment]
    simulated.library.contexts.clear()
    gc.collect()
    assert memory.held == 0
    assert not simulated.driver.streams


def test_logits_that_are_no_numbers_end_the_text_with_an_error(simulated):
    buffers = simulated.pipeline.verifier.new_buffers()
    buffers.forward("full", [1, 2, 3], 0, 1)
    kv = simulated.driver.memory.at(buffers._kv.address, buffers._kv.size).view(np.float32)
    kv[:] = np.nan
    with pytest.raises(LogitsError, match="bf16"):
        buffers.forward("full", [4], 3, 1)
