"""What can run a bundle, by name: ONNX Runtime over the bundle's own graphs, or what `build` made of them."""

from __future__ import annotations

from typing import Any

from via_sd.contract.manifest import Bundle
from via_sd.errors import BundleError
from via_sd.runtime.engines.ort import SLOTS, OrtEngine
from via_sd.runtime.engines.protocol import ReadableEngine
from via_sd.runtime.engines.providers import default_device, parse_device

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
    device: str | None = None,
    threads: int | None = None,
    slots: int = SLOTS,
    deterministic: bool = False,
    trust_engines: bool = False,
    verify: bool = True,
) -> tuple[ReadableEngine, ReadableEngine | None]:
    """The verifier of `bundle` and its model drafter, if it has one, on one backend.

    Args:
        backend: one of `BACKENDS`.
        device: `cpu`, `cuda` or `cuda:N`. By default what the backend computes on; for the bundle's own graphs that is
            the first GPU where the ONNX Runtime for GPUs is installed, and the CPU otherwise.
        threads: threads of one pass on a CPU; the number of physical cores if None.
        slots: most sequences with KV buffers at once, where they share passes.
        deterministic: make no result depend on what else a pass computes; only the bundle's own graphs can.
        trust_engines: run TensorRT engines that were not built on this machine.
        verify: compare the hash of every file that `build` made with its manifest.

    Raises:
        BundleError: an unknown backend or device, one that is not installed, or files it lacks or cannot run here.
    """
    if backend not in BACKENDS:
        raise BundleError(f"backend {backend!r} is not known; backends are {', '.join(BACKENDS)}")
    kind, ordinal = _device_of(backend, device)
    if backend == ONNXRUNTIME:
        if kind != "cpu":
            raise BundleError(
                f"the graphs of {bundle.path} give their attention the lengths of several sequences, which "
                "onnxruntime-gpu 1.31.1 does not take, nor float32; run it with device='cpu' (--device cpu), or run "
                f"`via-sd-export build {bundle.path} --dtype fp16` and load it with backend='portable-cuda' "
                "(--backend portable-cuda)"
            )
        return _own_graphs(bundle, threads, slots, deterministic)
    if deterministic:
        raise BundleError(f"backend {backend} has no deterministic passes; use {ONNXRUNTIME}")
    if backend in ENGINES:
        from via_sd.runtime.engines.tensorrt.engine import load_engines

        return load_engines(bundle, backend, ordinal=ordinal, trust=trust_engines, verify=verify)
    from via_sd.runtime.engines.portable import load_graphs

    built = bundle.manifest.get("engines", {})
    target = next((name for name in ENGINES if name in built), ENGINES[0])
    provider = backend.removeprefix(_PORTABLE)
    return load_graphs(bundle, target, provider, ordinal=ordinal, threads=threads, verify=verify)


def _device_of(backend: str, device: str | None) -> tuple[str, int]:
    """What `backend` computes on, `cpu` or `cuda`, and the number of the GPU."""
    if backend == ONNXRUNTIME:
        return parse_device(device or default_device())
    computes_on = "cpu" if backend in ON_CPU else "cuda"
    kind, ordinal = parse_device(device or computes_on)
    if kind != computes_on:
        raise BundleError(f"backend {backend} computes on {computes_on}, and the device asked for is {device}")
    return kind, ordinal


def _own_graphs(
    bundle: Bundle, threads: int | None, slots: int, deterministic: bool
) -> tuple[ReadableEngine, ReadableEngine | None]:
    verifier, described = bundle.manifest["verifier"], bundle.manifest["drafter"]
    if verifier["kv"]["dtype"] == "bfloat16":
        raise BundleError(
            f"{bundle.path} is bf16, for which ONNX Runtime has no kernels on a CPU; export it in fp16 (--precision "
            "fp16), which has half the memory of fp32 too, or in fp32, int8 or int4"
        )

    def engine(description: dict[str, Any], max_seq_len: int) -> OrtEngine:
        graph = bundle.graph(description)
        return OrtEngine(graph, description, max_seq_len, threads=threads, slots=slots, deterministic=deterministic)

    drafter = engine(described, described["max_seq_len"]) if described["kind"] == "model" else None
    return engine(verifier, bundle.max_seq_len), drafter
