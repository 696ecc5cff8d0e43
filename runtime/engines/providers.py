"""ONNX Runtime's execution providers: what each needs, and sessions that run on the provider that was asked for.

ONNX Runtime falls back to the CPU, with a warning, where a provider's libraries do not load. Here that is refused.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from via_sd.errors import BundleError
from via_sd.runtime.engines.ort import onnxruntime, open_session

_INSTALL_CUDA = "pip install 'via-sd-export[gpu]' in an environment without the [cpu] extra"


@dataclass(frozen=True)
class Provider:
    """An execution provider.

    Attributes:
        name: ONNX Runtime's.
        device: where its buffers are, `cpu` or `cuda`.
        install: what to do where it is missing.
        options: set in every session. TF32 has 10 bits of mantissa, which float32 limits do not allow for.
        plugin: the Python package that brings it as a library of its own; empty where ONNX Runtime has it built in.
        shares_weights: it takes initializers from outside; others compile weights into engines of their own.
    """

    name: str
    device: str
    install: str = ""
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    plugin: str = ""
    shares_weights: bool = False


#: By the name they have here.
PROVIDERS = {
    "cpu": Provider("CPUExecutionProvider", "cpu", shares_weights=True),
    "cuda": Provider("CUDAExecutionProvider", "cuda", _INSTALL_CUDA, {"use_tf32": "0"}, shares_weights=True),
    "tensorrt": Provider(
        "TensorrtExecutionProvider",
        "cuda",
        f"{_INSTALL_CUDA}, and TensorRT's libraries, where the loader finds them",
    ),
    "nv-tensorrt-rtx": Provider(
        "NvTensorRTRTXExecutionProvider",
        "cuda",
        "pip install 'via-sd-export[nv-tensorrt-rtx]'",
        plugin="onnxruntime_ep_nv_tensorrt_rtx",
    ),
}


def parse_device(device: str) -> tuple[str, int]:
    """Provider and ordinal of a device: `cpu`, `cuda` (the first GPU) or `cuda:1`.

    Raises:
        BundleError: another device.
    """
    match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", device)
    if match is None or (match[1] == "cpu" and match[2]):
        raise BundleError(f"device is {device!r}, wanted cpu, cuda or cuda:N with the number of a GPU")
    return match[1], int(match[2] or 0)


def default_device() -> str:
    """`cuda` where the installed ONNX Runtime is the one for GPUs, otherwise `cpu`."""
    return "cuda" if PROVIDERS["cuda"].name in onnxruntime().get_available_providers() else "cpu"


def open_on(graph: Path, options: Any, provider: Provider, ordinal: int = 0) -> Any:
    """A session over `graph` whose nodes `provider` takes, as far as it has kernels for them.

    Args:
        ordinal: which GPU.

    Raises:
        BundleError: the provider is not installed, its libraries do not load, or it does not take the graph.
    """
    if provider.device == "cpu":
        return open_session(graph, options)
    if provider.plugin:
        options.add_provider_for_devices([_plugin_device(provider, ordinal)], dict(provider.options))
        session = open_session(graph, options, [])
    else:
        wanted = (provider.name, {"device_id": str(ordinal), **provider.options})
        session = open_session(graph, options, [wanted])
    if provider.name not in (found := session.get_providers()):
        raise _did_not_load(provider, f"ONNX Runtime fell back to {', '.join(found)}")
    return session


def prepare(provider: Provider, ordinal: int = 0) -> None:
    """Load what `provider` needs; before anything is brought to its device.

    Raises:
        BundleError: the provider is not installed, its libraries do not load, or there is no such GPU.
    """
    runtime = onnxruntime()
    if provider.plugin:
        _plugin_device(provider, ordinal)
        return
    available = runtime.get_available_providers()
    if provider.name not in available:
        raise BundleError(f"this ONNX Runtime has no {provider.name}, only {', '.join(available)}; {provider.install}")
    if provider.device == "cpu":
        return
    runtime.preload_dlls()  # of the wheels that the extra brings; what lies elsewhere the loader finds
    try:
        runtime.OrtValue.ortvalue_from_shape_and_type([1], np.float32, provider.device, ordinal)
    except Exception as error:  # ONNX Runtime raises its own kinds, none of them public
        raise _did_not_load(provider, str(error)) from error


def _did_not_load(provider: Provider, found: str) -> BundleError:
    return BundleError(
        f"{provider.name} did not load ({found}): the NVIDIA driver or a library is missing, or there is no such GPU; "
        f"{provider.install}; or run on the CPU with device='cpu' (--device cpu)"
    )


def _plugin_device(provider: Provider, ordinal: int) -> Any:
    """The device that the plug-in of `provider` has under number `ordinal`."""
    try:
        plugin = importlib.import_module(provider.plugin)
    except ImportError:
        raise BundleError(
            f"{provider.name} comes with the Python package {provider.plugin}, which is not installed; "
            f"{provider.install}"
        ) from None
    runtime = onnxruntime()

    def devices() -> list[Any]:
        return [device for device in runtime.get_ep_devices() if device.ep_name == plugin.get_ep_name()]

    if not devices():
        try:
            runtime.register_execution_provider_library(plugin.get_ep_name(), plugin.get_library_path())
        except Exception as error:  # ONNX Runtime raises its own kinds, none of them public
            raise BundleError(
                f"{provider.name} does not load; it needs an NVIDIA GPU and its driver: {error}"
            ) from error
    if len(found := devices()) <= ordinal:
        raise BundleError(f"{provider.name} finds {len(found)} GPUs here, wanted number {ordinal}")
    return found[ordinal]
