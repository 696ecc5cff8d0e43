"""What can run a bundle, by name: ONNX Runtime over the bundle's own graphs, or what `build` made of them."""

from __future__ import annotations

from typing import Any

from via_sd.contract.manifest import Bundle
from via_sd.errors import BundleError
from via_sd.runtime.engines.ort import SLOTS, OrtEngine
from via_sd.runtime.engines.protocol import ReadableEngine

#: The bundle's own graphs on ONNX Runtime's CPU provider.
ONNXRUNTIME = "onnxruntime"
#: TensorRT engines.
ENGINES = ("tensorrt-rtx", "tensorrt")
#: The portable graphs beside the engines, on one of ONNX Runtime's providers.
_PORTABLE = "portable-"
PORTABLE = tuple(_PORTABLE + provider for provider in ("cpu", "cuda", "tensorrt", "nv-tensorrt-rtx"))
BACKENDS = (ONNXRUNTIME, *ENGINES, *PORTABLE)
#: Those that compute on the CPU.
ON_CPU = (ONNXRUNTIME, _PORTABLE + "cpu")


def open_engines(
    bundle: Bundle,
    backend: str = ONNXRUNTIME,
    *,
    threads: int | None = None,
    slots: int = SLOTS,
    deterministic: bool = False,
    trust_engines: bool = False,
    verify: bool = True,
) -> tuple[ReadableEngine, ReadableEngine | None]:
    """The verifier of `bundle` and its model drafter, if it has one, on one backend.

    Args:
        backend: one of `BACKENDS`.
        threads: threads of one pass on a CPU; the number of physical cores if None.
        slots: most sequences with KV buffers at once, where they share passes.
        deterministic: make no result depend on what else a pass computes; only the bundle's own graphs can.
        trust_engines: run TensorRT engines that were not built on this machine.
        verify: compare the hash of every file that `build` made with its manifest.

    Raises:
        BundleError: an unknown backend, one that is not installed, or files it lacks or cannot run here.
    """
    if backend == ONNXRUNTIME:
        return _own_graphs(bundle, threads, slots, deterministic)
    if deterministic:
        raise BundleError(f"backend {backend} has no deterministic passes; use {ONNXRUNTIME}")
    if backend in ENGINES:
        from via_sd.runtime.engines.tensorrt.engine import load_engines

        return load_engines(bundle, backend, trust=trust_engines, verify=verify)
    if backend in PORTABLE:
        from via_sd.runtime.engines.portable import load_graphs

        built = bundle.manifest.get("engines", {})
        target = next((name for name in ENGINES if name in built), ENGINES[0])
        return load_graphs(bundle, target, backend.removeprefix(_PORTABLE), threads=threads, verify=verify)
    raise BundleError(f"backend {backend!r} is not known; backends are {', '.join(BACKENDS)}")


def _own_graphs(
    bundle: Bundle, threads: int | None, slots: int, deterministic: bool
) -> tuple[ReadableEngine, ReadableEngine | None]:
    verifier, described = bundle.manifest["verifier"], bundle.manifest["drafter"]

    def engine(description: dict[str, Any], max_seq_len: int) -> OrtEngine:
        graph = bundle.file(description["graph"])
        return OrtEngine(graph, description, max_seq_len, threads=threads, slots=slots, deterministic=deterministic)

    drafter = engine(described, described["max_seq_len"]) if described["kind"] == "model" else None
    return engine(verifier, bundle.max_seq_len), drafter
