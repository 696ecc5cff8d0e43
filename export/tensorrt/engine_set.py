"""Build the engines of a bundle for one target: graphs, one weights file, plans, and the manifest that describes them.

engines/<target>/
  full.onnx, <mask>.onnx, drafter.onnx   portable graphs over weights.data; they run in ONNX Runtime as they are
  weights.data                           every tensor of every model once, in the target's element type and layout
  full.plan, …                           engines; the weights are inputs, unless they were embedded
  engines.json, build.log
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import onnx_ir as ir

from via_sd.contract.engines_manifest import ENGINES_MANIFEST, write_engines_manifest
from via_sd.contract.file_entries import describe_files, difference
from via_sd.contract.graphs import DRAFTER, VERIFIER
from via_sd.contract.manifest import ENGINES_FOLDER, set_engines
from via_sd.errors import ExportError
from via_sd.export.portable import portable_dtype, to_portable
from via_sd.export.tensorrt.builder import BuildOptions, build_plan
from via_sd.export.tensorrt.library import RTX, Library, host_platform, load_library
from via_sd.export.tensorrt.log import BuildLog
from via_sd.export.tensorrt.manifest import (
    LOG,
    TIMING_CACHE,
    Request,
    engines_manifest,
    is_intact,
    read_engines_manifest,
)
from via_sd.export.tensorrt.profiles import plan_profiles
from via_sd.export.tensorrt.source import Decoder, Source, open_decoder, read_source
from via_sd.export.tensorrt.weights import (
    Table,
    refer_to_weights,
    shared_weights,
    weights_as_inputs,
    write_shared_weights,
)
from via_sd.export.writer.describe import describe_values
from via_sd.files import check_space, whole_directory
from via_sd.progress import Progress, no_progress, prefixed

References = dict[str, "str | Path | None"]


@dataclass(frozen=True)
class EngineSet:
    """What a build left.

    Attributes:
        path: the folder of the engines.
        manifest: contents of engines.json.
        built: engine name -> seconds its build took, for those that were built.
        kept: engines that had not changed.
    """

    path: Path
    manifest: dict[str, Any]
    built: dict[str, float] = field(default_factory=dict)
    kept: tuple[str, ...] = ()


def build_engines(
    bundle: str | Path,
    target: str = RTX,
    *,
    dtype: str = "bf16",
    tokens: Sequence[int] | None = None,
    prefill: Sequence[int] | None = None,
    separate_profiles: bool | None = None,
    compute_capabilities: Sequence[str] = (),
    version_compatible: bool = False,
    embed_weights: bool = False,
    reference: str | Path | None = None,
    drafter_reference: str | Path | None = None,
    trusted: Collection[str] | None = None,
    progress: Progress = no_progress,
) -> EngineSet:
    """Build engines for full, every mask and a model drafter of `bundle`, under `engines/<target>`.

    Args:
        bundle: bundle directory; its manifest gets an entry for the engines.
        target: `tensorrt-rtx` (needs no GPU to build) or `tensorrt`.
        dtype: of weights, activations and KV: `bf16`, `fp16` or `fp32`.
        tokens: (min, opt, max) tokens of a verify step.
        prefill: (min, opt, max) tokens of a prefill chunk.
        separate_profiles: a profile each for single step, verify and prefill, or one for all; by default what the
            target is best at (see `plan_profiles`).
        compute_capabilities: for TensorRT for RTX, such as "8.9"; all it has kernels for by default.
        version_compatible: let later versions of the library run the plans.
        embed_weights: put the weights into every plan instead of sharing one copy between them.
        reference: the verifier's checkpoint; needed when the bundle is quantised.
        drafter_reference: likewise for a model drafter.
        trusted: sha256 of the plans that may be kept when nothing has changed; None for all. A plan that came with a
            copied bundle is code from elsewhere.

    Returns:
        The engines, and which of them had to be built.

    Raises:
        BundleError: no bundle there, or a damaged one.
        ExportError: bad arguments, a library that is missing, or a model it cannot build.
        DiskSpaceError: the weights or a plan do not fit on the disk.
    """
    library = load_library(target)
    source = read_source(Path(bundle))
    try:
        portable_dtype(dtype)
    except ValueError as error:
        raise ExportError(str(error)) from None
    separate = not library.is_rtx if separate_profiles is None else separate_profiles
    profiles = {d.name: plan_profiles(tokens, prefill, d.max_seq_len, separate=separate) for d in source.decoders}
    capabilities = library.capabilities(compute_capabilities)
    if dtype == "bf16" and "7.5" in capabilities:
        raise ExportError("compute capability 7.5 has no bf16 arithmetic; build with --dtype fp16, or leave out 7.5")
    request = Request(
        target=target,
        library={"name": library.name, "version": library.version},
        platform=host_platform(),
        made_by=version("via-sd-export"),
        source=source.files,
        dtype=dtype,
        profiles={name: [profile.to_json() for profile in of_model] for name, of_model in profiles.items()},
        compute_capabilities=list(capabilities),
        version_compatible=version_compatible,
        embed_weights=embed_weights,
    )
    folder = source.directory / ENGINES_FOLDER / target
    previous = _forget(read_engines_manifest(folder), trusted)
    complete = previous is not None and {name for d in source.decoders for name in d.engines} == set(
        previous["engines"]
    )
    if previous is not None and complete and previous["request"] == asdict(request) and is_intact(folder, previous):
        set_engines(source.directory, target, folder / ENGINES_MANIFEST)
        return EngineSet(folder, previous, kept=tuple(previous["engines"]))
    references: References = {VERIFIER: reference, DRAFTER: drafter_reference}
    with whole_directory(folder, replace=True) as partial:
        graphs = _write_graphs(source, partial, dtype, references, progress)
        log = BuildLog()
        log.note(f"{library.name} {library.version}: {json.dumps(asdict(request), sort_keys=True)}")
        if (folder / TIMING_CACHE).is_file():
            shutil.copyfile(folder / TIMING_CACHE, partial / TIMING_CACHE)
        timing = None if library.is_rtx else partial / TIMING_CACHE  # RTX chooses kernels where the engine runs
        job = _Job(library, request, partial, folder, previous, log, progress)
        engines, built = {}, {}
        for decoder in source.decoders:
            options = BuildOptions(profiles[decoder.name], capabilities, version_compatible, timing)
            for name in decoder.engines:
                engines[name], seconds = job.engine(decoder, name, graphs, options)
                if seconds is not None:
                    built[name] = seconds
        log.write(partial / LOG)
        progress("hashing", None)
        rebuild = _rebuild_options(source, request, tokens, prefill, separate_profiles, compute_capabilities)
        files = describe_files(partial, leave_out=(LOG, TIMING_CACHE))
        manifest = engines_manifest(source, request, rebuild, graphs.table, engines, files)
        write_engines_manifest(partial, manifest)
        set_engines(source.directory, target, None)
    set_engines(source.directory, target, folder / ENGINES_MANIFEST)
    return EngineSet(folder, manifest, built, tuple(name for name in engines if name not in built))


def _forget(previous: dict[str, Any] | None, trusted: Collection[str] | None) -> dict[str, Any] | None:
    """`previous` without the engines whose plan is not `trusted`."""
    if previous is None or trusted is None:
        return previous
    files = previous["files"]
    kept = {n: entry for n, entry in previous["engines"].items() if files[entry["plan"]]["sha256"] in trusted}
    return {**previous, "engines": kept}


def _rebuild_options(
    source: Source,
    request: Request,
    tokens: Sequence[int] | None,
    prefill: Sequence[int] | None,
    separate_profiles: bool | None,
    compute_capabilities: Sequence[str],
) -> str:
    """The options of the command line that ask for these engines."""
    options = ["--target", request.target, "--dtype", request.dtype]
    for name, sizes in (("--tokens", tokens), ("--prefill", prefill)):
        options += [name, ",".join(map(str, sizes))] if sizes is not None else []
    if separate_profiles is not None:
        options += ["--profiles", "separate" if separate_profiles else "joint"]
    for capability in compute_capabilities:
        options += ["--compute-capability", capability]
    options += ["--version-compatible"] if request.version_compatible else []
    options += ["--embed-weights"] if request.embed_weights else []
    if source.quantised:
        options += ["--reference", "CHECKPOINT"]
        options += ["--drafter-reference", "CHECKPOINT"] if len(source.decoders) > 1 else []
    return " ".join(options)


@dataclass(frozen=True)
class _Graphs:
    """The portable graphs of a set, by engine name, and where their weights lie."""

    models: dict[str, ir.Model]
    table: Table


def _write_graphs(source: Source, folder: Path, dtype: str, references: References, progress: Progress) -> _Graphs:
    models: dict[str, ir.Model] = {}
    whole: dict[str, ir.Model] = {}
    with ExitStack() as stack:  # the weights are read when they are written, at the end of the block
        for decoder in source.decoders:
            said = prefixed(progress, decoder.name)
            model = stack.enter_context(open_decoder(source, decoder, references[decoder.name], said))
            said("portable graphs", None)
            for name, mask in decoder.engines.items():
                models[name] = to_portable(model, max_seq_len=decoder.max_seq_len, dtype=dtype, mask=mask)
                if mask is None:
                    whole[decoder.name] = models[name]
        table = write_shared_weights(whole, folder, progress)
    for decoder in source.decoders:
        for name in decoder.engines:
            refer_to_weights(models[name], table[decoder.name])
            ir.save(models[name], folder / f"{name}.onnx")
    return _Graphs(models, table)


@dataclass(frozen=True)
class _Job:
    """One build of a set: what every plan in it shares."""

    library: Library
    request: Request
    folder: Path
    previous_folder: Path
    previous: dict[str, Any] | None
    log: BuildLog
    progress: Progress

    def engine(
        self, decoder: Decoder, name: str, graphs: _Graphs, options: BuildOptions
    ) -> tuple[dict[str, Any], float | None]:
        """Build one plan, or keep the one that is there; its entry in the manifest, and the seconds it took now."""
        model, embed = graphs.models[name], self.request.embed_weights
        plan = f"{name}.plan"
        serialised = weights_as_inputs(model)
        embedded = [graphs.table[decoder.name][v.name or ""] for v in shared_weights(model)] if embed else []
        key = self.request.key(decoder.name, serialised, embedded)
        seconds, taken = self._kept(name, plan, key), None
        if seconds is None:
            self.log.note(f"engine {name}")
            start = perf_counter()
            content = build_plan(
                self.library,
                str(self.folder / f"{name}.onnx") if embed else serialised,
                options,
                self.log,
                name=name,
                progress=self.progress,
            )
            seconds = taken = perf_counter() - start
            check_space(self.folder, len(content), plan)
            (self.folder / plan).write_bytes(content)
        mask = decoder.engines[name]
        entry = {
            "model": decoder.name,
            "graph": f"{name}.onnx",
            "plan": plan,
            "key": key,
            "build_seconds": round(seconds, 2),
            "inputs": describe_values(model.graph.inputs),
            "outputs": describe_values(model.graph.outputs),
            "weights": [] if embed else [value.name for value in shared_weights(model)],
        }
        return (entry if mask is None else {**entry, "mask": mask.to_json()}), taken

    def _kept(self, name: str, plan: str, key: str) -> float | None:
        """Take the plan of the previous build over if it is the one wanted; the seconds it took then."""
        entry = None if self.previous is None else self.previous["engines"].get(name)
        if self.previous is None or entry is None or entry["key"] != key:
            return None
        if difference(self.previous_folder / plan, self.previous["files"][plan]) is not None:
            return None
        check_space(self.folder, (self.previous_folder / plan).stat().st_size, plan)
        shutil.copyfile(self.previous_folder / plan, self.folder / plan)
        self.log.note(f"engine {name}: unchanged, kept")
        return float(entry["build_seconds"])
