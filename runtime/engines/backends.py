"""What can run a bundle, by name: ONNX Runtime over the bundle's own graphs, or what `build` made of them."""

from __future__ import annotations

from via_sd.contract.manifest import Bundle
from via_sd.errors import BundleError
from via_sd.runtime.engines.ort import OrtEngine
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
    trust_engines: bool = False,
    verify: bool = True,
) -> tuple[ReadableEngine, ReadableEngine | None]:
    """The verifier of `bundle` and its model drafter, if it has one, on one backend.

    Args:
        backend: one of `BACKENDS`.
        threads: threads of one pass on a CPU; the number of physical cores if None.
        trust_engines: run TensorRT engines that were not built on this machine.
        verify: compare the hash of every file that `build` made with its manifest.

    Raises:
        BundleError: an unknown backend, one that is not installed, or files it lacks or cannot run here.
    """
    if backend == ONNXRUNTIME:
        return _own_graphs(bundle, threads)
    if backend in ENGINES:
        from via_sd.runtime.engines.tensorrt.engine import load_engines

        return load_engines(bundle, backend, trust=trust_engines, verify=verify)
    if backend in PORTABLE:
        from via_sd.runtime.engines.portable import load_graphs

        built = bundle.manifest.get("engines", {})
        target = next((name for name in ENGINES if name in built), ENGINES[0])
        return load_graphs(bundle, target, backend.removeprefix(_PORTABLE), threads=threads, verify=verify)
    raise BundleError(f"backend {backend!r} is not known; backends are {', '.join(BACKENDS)}")


def _own_graphs(bundle: Bundle, threads: int | None) -> tuple[ReadableEngine, ReadableEngine | None]:
    verifier, described = bundle.manifest["verifier"], bundle.manifest["drafter"]
    engine = OrtEngine(bundle.file(verifier["graph"]), verifier, bundle.max_seq_len, threads=threads)
    if described["kind"] != "model":
        return engine, None
    graph = bundle.file(described["graph"])
    return engine, OrtEngine(graph, described, described["max_seq_len"], threads=threads)
