"""Execution providers: what was asked for is what runs, or a refusal says what to install."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from via_sd.errors import BundleError
from via_sd.runtime import Pipeline, load_bundle
from via_sd.runtime.engines import providers
from via_sd.runtime.engines.backends import open_engines
from via_sd.runtime.engines.ort import session_options
from via_sd.runtime.engines.providers import PROVIDERS, default_device, open_on, parse_device, prepare


@pytest.mark.parametrize(("device", "wanted"), [("cpu", ("cpu", 0)), ("cuda", ("cuda", 0)), ("cuda:3", ("cuda", 3))])
def test_a_device_names_a_provider_and_a_gpu(device: str, wanted: tuple[str, int]) -> None:
    assert parse_device(device) == wanted


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:1", "CUDA", ""])
def test_another_device_is_refused_with_those_there_are(device: str) -> None:
    with pytest.raises(BundleError, match="wanted cpu, cuda or cuda:N"):
        parse_device(device)


def test_a_bundle_is_not_run_on_the_cpu_where_a_gpu_was_asked_for(tiny_bundle) -> None:
    with pytest.raises(BundleError, match=r"float32.*--device cpu.*--backend portable-cuda"):
        Pipeline.load(tiny_bundle, device="cuda")


def test_a_bundle_is_not_quietly_run_on_the_cpu_where_the_onnx_runtime_for_gpus_is_installed(
    tiny_bundle, monkeypatch
) -> None:
    found = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(ort, "get_available_providers", lambda: found)
    assert default_device() == "cuda"
    with pytest.raises(BundleError, match="--device cpu"):
        Pipeline.load(tiny_bundle)
    assert open_engines(load_bundle(tiny_bundle), device="cpu", threads=1)[0].tiers == ("full", "slim")


@pytest.mark.parametrize(("backend", "device"), [("portable-cpu", "cuda"), ("tensorrt-rtx", "cpu")])
def test_a_device_that_a_backend_does_not_compute_on_is_refused(tiny_bundle, backend: str, device: str) -> None:
    with pytest.raises(BundleError, match=f"backend {backend} computes on"):
        Pipeline.load(tiny_bundle, backend=backend, device=device)


def test_a_provider_whose_libraries_do_not_load_is_refused_and_not_replaced_by_the_cpu(
    tiny_bundle, monkeypatch
) -> None:
    """What `onnxruntime-gpu` does without CUDA: a warning, and a session on the CPU."""
    session = SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])
    asked: dict[str, Any] = {}

    def fall_back(path: str, options: Any, *, providers: Any, enable_fallback: bool) -> Any:
        asked.update(providers=providers, enable_fallback=enable_fallback)
        return session

    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(ort, "InferenceSession", fall_back)
    graph = tiny_bundle / "verifier/model.onnx"
    with pytest.raises(BundleError, match=r"CUDAExecutionProvider did not load.*via-sd-export\[gpu\].*device='cpu'"):
        open_on(graph, session_options(1), PROVIDERS["cuda"], 1)
    # Float32 limits are promised, and TF32 does not hold them.
    assert asked == {
        "providers": [("CUDAExecutionProvider", {"device_id": "1", "use_tf32": "0"})],
        "enable_fallback": False,
    }


def test_a_driver_that_is_missing_is_named_before_weights_are_brought_to_the_device(monkeypatch) -> None:
    """This ONNX Runtime is told that it has the provider; it has no allocator for the device, as without a driver."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    with pytest.raises(BundleError, match=r"CUDAExecutionProvider did not load .*driver.*--device cpu"):
        prepare(PROVIDERS["cuda"])


def test_tensorrt_for_rtx_is_a_plug_in_that_is_asked_for_where_it_is_missing(tiny_bundle) -> None:
    pytest.importorskip("onnxruntime")
    if providers.importlib.util.find_spec(PROVIDERS["nv-tensorrt-rtx"].plugin):
        pytest.skip("the plug-in is installed")
    with pytest.raises(BundleError, match=r"pip install 'via-sd-export\[nv-tensorrt-rtx\]'"):
        open_on(tiny_bundle / "verifier/model.onnx", session_options(1), PROVIDERS["nv-tensorrt-rtx"])


class Plugin:
    """The plug-in's package: its library is not there, which is as far as a machine without a GPU gets."""

    @staticmethod
    def get_ep_name() -> str:
        return "NvTensorRTRTXExecutionProvider"

    @staticmethod
    def get_library_path() -> str:
        return "/nowhere/libonnxruntime_providers_nv_tensorrt_rtx.so"


def test_a_plug_in_is_registered_as_a_library_and_says_what_it_needs(tiny_bundle, monkeypatch) -> None:
    monkeypatch.setattr(providers.importlib, "import_module", lambda name: Plugin)
    with pytest.raises(BundleError, match=r"needs an NVIDIA GPU and its driver.*/nowhere/lib"):
        open_on(tiny_bundle / "verifier/model.onnx", session_options(1), PROVIDERS["nv-tensorrt-rtx"])


def test_the_devices_of_a_plug_in_are_added_to_the_session(tiny_bundle, monkeypatch) -> None:
    first, second = (SimpleNamespace(ep_name=Plugin.get_ep_name()) for _ in range(2))
    monkeypatch.setattr(providers.importlib, "import_module", lambda name: Plugin)
    monkeypatch.setattr(ort, "get_ep_devices", lambda: [SimpleNamespace(ep_name="CPUExecutionProvider"), first, second])
    added: list[Any] = []
    options = SimpleNamespace(add_provider_for_devices=lambda devices, settings: added.append((devices, settings)))
    session = SimpleNamespace(get_providers=lambda: [Plugin.get_ep_name(), "CPUExecutionProvider"])
    monkeypatch.setattr(ort, "InferenceSession", lambda path, options, *, providers, enable_fallback: session)
    assert open_on(tiny_bundle / "verifier/model.onnx", options, PROVIDERS["nv-tensorrt-rtx"], 1) is session
    assert added == [([second], {})]
    with pytest.raises(BundleError, match="finds 2 GPUs here, wanted number 2"):
        open_on(tiny_bundle / "verifier/model.onnx", options, PROVIDERS["nv-tensorrt-rtx"], 2)


def test_what_onnx_runtime_is_asked_for_exists_in_it() -> None:
    assert callable(ort.preload_dlls)
    assert callable(ort.SessionOptions.add_provider_for_devices)
    assert callable(ort.register_execution_provider_library)
    assert callable(ort.OrtValue.from_dlpack)


def test_an_initializer_that_owns_its_memory_is_refused_by_onnx_runtime() -> None:
    """Why weights that were copied to a device go to a session as views; see `GraphEngine`."""
    options, value = ort.SessionOptions(), ort.OrtValue.ortvalue_from_shape_and_type([8], np.float32)
    with pytest.raises(RuntimeError, match="must be owned by the user"):
        options.add_initializer("weight", value)
    options.add_initializer("weight", ort.OrtValue.from_dlpack(value))
