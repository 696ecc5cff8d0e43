"""The two TensorRT libraries behind one adapter: TensorRT for RTX, and TensorRT proper.

They share their Python API and differ in what a build needs. TensorRT for RTX compiles ahead of time for listed compute
capabilities and needs no GPU to build; TensorRT builds on, and for, the GPU that will run the engine.
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from via_sd.errors import ExportError

RTX, TENSORRT = "tensorrt-rtx", "tensorrt"
_MODULES = {RTX: "tensorrt_rtx", TENSORRT: "tensorrt"}
TARGETS = tuple(_MODULES)
#: Compute capabilities TensorRT for RTX has kernels for; the first is left out unless it is asked for.
RTX_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")


@dataclass(frozen=True)
class Library:
    """An imported TensorRT library.

    Attributes:
        target: what engines for it are called: `tensorrt-rtx` or `tensorrt`.
        module: the Python module.
    """

    target: str
    module: Any

    @property
    def name(self) -> str:
        return _MODULES[self.target]

    @property
    def version(self) -> str:
        return str(self.module.__version__)

    @property
    def is_rtx(self) -> bool:
        return self.target == RTX

    def capabilities(self, wanted: Sequence[str] = ()) -> tuple[str, ...]:
        """The compute capabilities to build for: `wanted`, or the target's default.

        Raises:
            ExportError: one the library has no kernels for, or a choice where it has none.
        """
        if not self.is_rtx:
            if wanted:
                raise ExportError(
                    "TensorRT builds for the GPU it runs on; compute capabilities are chosen for tensorrt-rtx only"
                )
            return ()
        unknown = [capability for capability in wanted if capability not in RTX_CAPABILITIES]
        if unknown:
            raise ExportError(
                f"TensorRT for RTX has no kernels for compute capability {', '.join(unknown)}, only for "
                f"{', '.join(RTX_CAPABILITIES)}; on other GPUs use --target tensorrt or ONNX Runtime's CUDA provider"
            )
        return tuple(dict.fromkeys(wanted)) or RTX_CAPABILITIES[1:]


def load_library(target: str) -> Library:
    """Import the library of `target`.

    Raises:
        ExportError: an unknown target, or a library that is not installed or does not load.
    """
    if target not in _MODULES:
        raise ExportError(f"target {target!r} is not known; targets are {', '.join(TARGETS)}")
    name = _MODULES[target]
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise ExportError(
            f"target {target} needs the Python module {name}, which does not load ({error}): "
            f"pip install 'via-sd-export[{target}]'"
        ) from None
    if not hasattr(module, "Builder") or not hasattr(module, "IAttentionOutputLayer"):
        version = getattr(module, "__version__", "unknown")
        raise ExportError(
            f"{name} {version} is too old: it has no attention over a KV cache; "
            f"pip install --upgrade 'via-sd-export[{target}]'"
        )
    return Library(target, module)


def host_platform() -> str:
    """Operating system and processor an engine is tied to, such as `linux-x86_64`."""
    return f"{platform.system().lower()}-{platform.machine()}"
