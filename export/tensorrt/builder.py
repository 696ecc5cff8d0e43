"""Build one plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from via_sd.contract.graphs import PORTABLE_INPUTS
from via_sd.errors import ExportError
from via_sd.export.tensorrt.library import Library
from via_sd.export.tensorrt.log import BuildLog
from via_sd.export.tensorrt.network import Network, parse_network
from via_sd.export.tensorrt.profiles import Profile
from via_sd.progress import Progress, no_progress


@dataclass(frozen=True)
class BuildOptions:
    """How plans are built.

    Attributes:
        profiles: step sizes to build for.
        capabilities: compute capabilities, as `Library.capabilities` gives them.
        version_compatible: let later minor versions of the library run the plan.
        timing_cache: file with kernel timings of earlier builds, read and extended; None for a library that times none.
    """

    profiles: Sequence[Profile]
    capabilities: Sequence[str] = ()
    version_compatible: bool = False
    timing_cache: Path | None = None


def build_plan(
    library: Library,
    graph: bytes | str,
    options: BuildOptions,
    log: BuildLog,
    *,
    name: str = "plan",
    progress: Progress = no_progress,
) -> bytes:
    """Build the plan of a portable graph.

    Args:
        graph: serialised graph, or path of a graph file whose weights lie beside it and become part of the plan.
        name: what `progress` calls it.

    Raises:
        ExportError: the library cannot build it; the message has its reason.
        UnsupportedModelError: it cannot read it (see `parse_network`).
    """
    network = parse_network(library, graph, log)
    config = network.builder.create_builder_config()
    for profile in options.profiles:
        config.add_optimization_profile(_profile(network, profile))
    # Float32 products would round their operands to TF32, 10 bits of mantissa, from compute capability 8.0 on.
    config.clear_flag(library.module.BuilderFlag.TF32)
    _set_capabilities(library, config, options.capabilities)
    if options.version_compatible:
        config.set_flag(library.module.BuilderFlag.VERSION_COMPATIBLE)
        if library.is_rtx:  # the lean runtime it would put into the plan is not part of the package
            config.set_flag(library.module.BuilderFlag.EXCLUDE_LEAN_RUNTIME)
    cache = _use_timing_cache(config, options.timing_cache)
    monitor = _monitor(library, lambda share: progress(f"building {name}", share))
    config.progress_monitor = monitor
    plan = network.builder.build_serialized_network(network.definition, config)
    if monitor.interrupted:
        raise KeyboardInterrupt
    if plan is None:
        raise ExportError(f"{library.name} {library.version} cannot build this model: {log.last_error()}")
    if cache is not None and options.timing_cache is not None:
        options.timing_cache.write_bytes(bytes(cache.serialize()))
    return bytes(plan)


def _profile(network: Network, profile: Profile) -> Any:
    result = network.builder.create_optimization_profile()
    sizes: dict[int | str, tuple[int, int, int]] = {
        "batch": (1, 1, 1),
        "tokens": profile.tokens.corners,
        "rows": profile.rows.corners,
        "visible": profile.visible.corners,
    }
    step_inputs = {tensor.name: tensor.shape for tensor in PORTABLE_INPUTS}
    for tensor in network.inputs:
        if tensor.name in step_inputs:
            result.set_shape(tensor.name, *zip(*(sizes[dim] for dim in step_inputs[tensor.name]), strict=True))
        elif -1 in tuple(tensor.shape):
            shape = tuple(1 if size == -1 else size for size in tensor.shape)
            result.set_shape(tensor.name, shape, shape, shape)
    return result


def _set_capabilities(library: Library, config: Any, capabilities: Sequence[str]) -> None:
    if not capabilities:
        return
    config.num_compute_capabilities = len(capabilities)
    for index, capability in enumerate(capabilities):
        member = getattr(library.module.ComputeCapability, "SM" + capability.replace(".", ""))
        if not config.set_compute_capability(member, index):
            raise ExportError(f"{library.name} {library.version} does not build for compute capability {capability}")


def _use_timing_cache(config: Any, file: Path | None) -> Any:
    if file is None:
        return None
    cache = config.create_timing_cache(file.read_bytes() if file.exists() else b"")
    # A cache of another version or GPU is ignored by the library, with a warning in the log.
    config.set_timing_cache(cache, ignore_mismatch=False)
    return cache


def _monitor(library: Library, report: Callable[[float], None]) -> Any:
    """A progress monitor that reports the outermost phase and turns Ctrl-C into a clean end of the build."""
    trt = library.module

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.interrupted = False
            self._steps: dict[str, int] = {}

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            if parent is None:
                self._steps[name] = steps

        def phase_finish(self, name: str) -> None:
            self._steps.pop(name, None)

        def step_complete(self, name: str, step: int) -> bool:
            # An exception must not pass through the library, which is not Python.
            try:
                if name in self._steps:
                    report((step + 1) / max(1, self._steps[name]))
            except KeyboardInterrupt:
                self.interrupted = True
            return not self.interrupted

    return Monitor()
