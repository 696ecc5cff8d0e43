"""Write a bundle: graphs of every tier over one weights file, tokenizer, manifest (docs/bundle.md)."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import xxhash

from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.export.passes import (
    AttentionSemanticsPass,
    FuseGateUpPass,
    LastLogitsPass,
    LimitPositionsPass,
    PrunePass,
    QuantizePass,
    RoutePass,
    StepInputsPass,
    constant_products,
    keep_vector,
    plan_segments,
)
from via_sd.export.sources.checkpoint import Checkpoint, open_checkpoint
from via_sd.export.writer.check import Reference, check_logits, reference_logits, source_logits
from via_sd.export.writer.input_energy import add_energy_outputs, input_energy
from via_sd.export.writer.tokenizer import export_tokenizer
from via_sd.export.writer.vocabulary import check_vocabularies
from via_sd.export.writer.weights import WEIGHTS_FILE, save_graph, write_weights
from via_sd.files import write_whole
from via_sd.masks import Mask, MaskFormat, ModelIdentity, read_mask

FORMAT = "via-sd-bundle"
VERSION = 1
MANIFEST = "bundle.json"
DEFAULT_MAX_SEQ_LEN = 4096
Precision = Literal["fp32", "int8", "int4"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8", "int4")
#: Called with (what is being done, how much of it is done, 0 to 1 or None when unknown).
Progress = Callable[[str, float | None], None]


@dataclass(frozen=True)
class _Decoder:
    """One exported decoder: what the manifest says of it, and how the self-check went."""

    manifest: dict[str, Any]
    check: dict[str, Any] | None


def export_bundle(
    verifier: str | Path,
    out: str | Path,
    *,
    masks: Sequence[Mask | str | Path] = (),
    mask_format: MaskFormat | None = None,
    drafter: str = "ngram",
    precision: str | None = None,
    max_seq_len: int | None = None,
    check: bool = True,
    progress: Progress = lambda *_: None,
) -> Path:
    """Export `verifier` and its tiers to the bundle directory `out`.

    Args:
        verifier: Hugging Face directory, hub id, GGUF file, or directory with an ONNX decoder of the ONNX Runtime GenAI
            model builder.
        out: directory to create; it appears when everything in it is complete.
        masks: masks or mask files; the first is the slim-verifier.
        mask_format: what a bare array in a mask file means.
        drafter: `ngram`, `mask:FILE` (a deeper mask of the verifier), or another model with the same vocabulary.
        precision: of the weights: `fp32`, or weight-only `int8` or `int4` (blocks of 32, symmetric); by default what
            the weights are in an ONNX decoder, and `fp32` otherwise.
        max_seq_len: capacity of a KV buffer in tokens; the model's limit or 4096, whichever is less, by default.
        check: compare with transformers on the checkpoint, or with the ONNX decoder as it came, before the bundle is
            completed.

    Returns:
        `out` as a path.

    Raises:
        ExportError: bad arguments or input, or a bundle that does not compute what the checkpoint does.
        MaskError: a mask that cannot be read or does not fit.
    """
    target = Path(out)
    if target.exists():
        raise ExportError(f"{target} exists; remove it or choose another --out")
    if precision is not None and precision not in PRECISIONS:
        raise ExportError(
            f"precision {precision!r} is not known; the CPU bundle takes {', '.join(PRECISIONS)} "
            "(fp16 and bf16 are for engines)"
        )
    with _complete_or_nothing(target) as directory, open_checkpoint(verifier, lambda t: progress(t, None)) as source:
        precision = _precision(precision, source, str(verifier))
        tiers = [_resolve(mask, source.identity, mask_format) for mask in masks]
        drafter_mask = _drafter_mask(drafter, source.identity, mask_format)
        limit = _capacity(max_seq_len, source.config)
        (directory / "verifier").mkdir()
        tokenizer = export_tokenizer(source.directory, directory, source.config)
        every = tiers + ([drafter_mask] if drafter_mask else [])
        _check_nesting(every)
        decoder = _export_decoder(source, directory / "verifier", every, precision, limit, check, progress)
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "model": source.identity.to_json(),
            "precision": precision,
            "max_seq_len": limit,
            "tokenizer": tokenizer,
            "verifier": decoder.manifest,
            "slim": tiers[0].name if tiers else None,
            "drafter": {"kind": "ngram"},
            "check": decoder.check,
            "made_by": _versions(),
        }
        if drafter_mask:
            manifest["drafter"] = {"kind": "mask", "tier": drafter_mask.name}
        elif drafter != "ngram":
            manifest["drafter"] = _export_drafter(drafter, directory, source, precision, limit, check, progress)
        progress("hashing", None)
        manifest["files"] = hash_files(directory)
        write_manifest(directory, manifest)
    return target


def hash_files(directory: Path) -> dict[str, dict[str, Any]]:
    """Size, sha256 and XXH3-64 of every file below `directory` but the manifest, by relative path."""
    files = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file() and p.name != MANIFEST):
        sha, fast = hashlib.sha256(), xxhash.xxh3_64()
        with path.open("rb") as stream:
            while chunk := stream.read(1 << 22):
                sha.update(chunk)
                fast.update(chunk)
        files[path.relative_to(directory).as_posix()] = {
            "size": path.stat().st_size,
            "sha256": sha.hexdigest(),
            "xxh3": fast.hexdigest(),
        }
    return files


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Write or replace the manifest of the bundle in `directory` in one step."""
    write_whole(directory / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")


def _export_decoder(
    source: Checkpoint,
    directory: Path,
    masks: list[Mask],
    precision: str,
    max_seq_len: int,
    check: bool,
    progress: Progress,
) -> _Decoder:
    model = source.model
    lower(model, source.config, max_seq_len)
    kv = _kv_contract(model)
    reference = _reference(source, max_seq_len, progress) if check else None
    quantised = source.precision is None and precision != "fp32"
    if precision != "fp32":
        FuseGateUpPass()(model)
    if quantised:
        energy: dict[str, np.ndarray] = {}
        if reference or precision == "int4":
            progress(
                "checking the graph before it is quantised" if check else "measuring the graph's activations", None
            )
            energy = _before_quantisation(model, directory, reference, precision, max_seq_len, source.config)
        quantise(model, precision, progress, energy)
    segments = plan_segments(masks, 2 * source.identity.num_layers)
    slims = {mask.name: PrunePass(mask)(model.clone()).model for mask in masks}
    routed = RoutePass(segments)(model.clone()).model

    weights = write_weights(model, directory, lambda name, done, total: progress("writing weights", done / total))
    save_graph(routed, directory / "model.onnx", weights)
    tiers: dict[str, Any] = {"full": {"keep": [True] * len(segments), "graph": f"{directory.name}/model.onnx"}}
    for mask in masks:
        name = "slim.onnx" if len(masks) == 1 else f"slim-{mask.name}.onnx"
        save_graph(slims[mask.name], directory / name, weights)
        tiers[mask.name] = {
            "keep": keep_vector(mask, segments),
            "graph": f"{directory.name}/{name}",
            "mask": mask.to_json(),
        }
    result = None
    if reference:
        progress("checking the bundle's graph", None)
        found = check_logits(directory / "model.onnx", reference, quantised=quantised)
        result = {"against": reference.computed_by, **found.to_json()}
    manifest = {
        "graph": f"{directory.name}/model.onnx",
        "weights": f"{directory.name}/{WEIGHTS_FILE}",
        "inputs": _contract(routed.graph.inputs),
        "outputs": _contract(routed.graph.outputs),
        "kv": kv,
        "vocab_size": int(source.config["vocab_size"]),
        "segments": [[s.start, s.stop] for s in segments],
        "tiers": tiers,
    }
    return _Decoder(manifest, result)


def lower(model: ir.Model, config: dict[str, Any], max_seq_len: int) -> None:
    """Turn a frontend's decoder graph into ours, in place: step inputs, exact attention, the last logits only."""
    StepInputsPass()(model)
    AttentionSemanticsPass(config, max_seq_len)(model)
    LimitPositionsPass(max_seq_len)(model)
    LastLogitsPass()(model)


def quantise(
    model: ir.Model,
    precision: str,
    progress: Progress,
    energy: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> None:
    """Make the weights of a lowered graph `int4` or `int8`, in place; for `energy` see `QuantizePass`."""
    count = len(list(constant_products(model.graph)))
    done = itertools.count(1)
    bits = int(precision.removeprefix("int"))
    QuantizePass(bits, energy=energy, progress=lambda _: progress("quantising", next(done) / count))(model)


def _before_quantisation(
    model: ir.Model,
    directory: Path,
    reference: Reference | None,
    precision: str,
    max_seq_len: int,
    config: dict[str, Any],
) -> dict[str, np.ndarray]:
    """Hold the float32 graph to float32 limits: afterwards quantisation is all that can differ.

    Returns:
        The input energies that int4 is fitted to; int8 needs none.
    """
    fitted = precision == "int4"
    with TemporaryDirectory(prefix=".check-", dir=directory) as scratch:
        plain, path = model.clone(), Path(scratch) / "model.onnx"
        if fitted:
            add_energy_outputs(plain)
        save_graph(plain, path, write_weights(plain, Path(scratch)))
        if reference:
            check_logits(path, reference, quantised=False)
        return input_energy(path, int(config["vocab_size"]), max_seq_len) if fitted else {}


def _export_drafter(
    drafter: str,
    directory: Path,
    verifier: Checkpoint,
    precision: str,
    max_seq_len: int,
    check: bool,
    progress: Progress,
) -> dict[str, Any]:
    with open_checkpoint(drafter, lambda t: progress(f"drafter: {t}", None)) as source:
        shared = check_vocabularies(verifier.directory, source.directory, verifier.config, source.config)
        (directory / "drafter").mkdir()
        _precision(precision, source, drafter)
        limit = min(max_seq_len, _capacity(None, source.config, at_most=max_seq_len))
        decoder = _export_decoder(source, directory / "drafter", [], precision, limit, check, progress)
        return {
            "kind": "model",
            "model": source.identity.to_json(),
            "max_seq_len": limit,
            "shared_vocab": shared,
            **{k: v for k, v in decoder.manifest.items() if k not in ("segments", "tiers")},
        }


def _precision(wanted: str | None, source: Checkpoint, name: str) -> str:
    """Precision of a decoder's weights: as asked, where they are not quantised already."""
    if source.precision is None:
        return wanted or "fp32"
    if wanted not in (None, source.precision):
        raise ExportError(
            f"the weights in {name} are {source.precision} already, wanted {wanted}: they are kept as they are, so "
            f"give --precision {source.precision}, or export from the unquantised model"
        )
    return source.precision


def _reference(source: Checkpoint, max_seq_len: int, progress: Progress) -> Reference:
    if source.source is not None:
        progress("running the graph as it came", None)
        return source_logits(source.source, max_seq_len, source.config)
    progress("running the checkpoint in transformers", None)
    return reference_logits(source.directory, max_seq_len, source.config)


def _resolve(mask: Mask | str | Path, model: ModelIdentity, mask_format: MaskFormat | None) -> Mask:
    if not isinstance(mask, Mask):
        mask = read_mask(mask, num_layers=model.num_layers, mask_format=mask_format)
    mask.check_model(model)
    if {*mask.states, mask.head} - {"keep", "skip"}:
        raise ExportError(f"mask '{mask.name}' has states other than keep and skip, which this release does not export")
    if mask.name == "full":
        raise ExportError("a mask cannot be called 'full': that is the verifier's own tier; rename the file")
    return mask


def _drafter_mask(drafter: str, model: ModelIdentity, mask_format: MaskFormat | None) -> Mask | None:
    return _resolve(drafter.removeprefix("mask:"), model, mask_format) if drafter.startswith("mask:") else None


def _check_nesting(masks: list[Mask]) -> None:
    for outer, inner in itertools.pairwise(masks):
        if inner.name == outer.name:
            raise ExportError(f"two masks are called '{inner.name}'; rename one of the files")
        if not inner.is_within(outer):
            extra = [
                layer
                for layer, (i, o) in enumerate(zip(inner.keep_attention, outer.keep_attention, strict=True))
                if i and not o
            ]
            raise ExportError(
                f"mask '{inner.name}' keeps the attention of layers {extra}, which '{outer.name}' skips: tiers share "
                "KV buffers, so every mask must keep a subset of the attention the mask before it keeps"
            )


def _capacity(wanted: int | None, config: dict[str, Any], at_most: int = DEFAULT_MAX_SEQ_LEN) -> int:
    limit = int(config.get("max_position_embeddings") or at_most)
    if wanted is None:
        return min(limit, at_most)
    if not 2 <= wanted <= limit:
        raise ExportError(f"--max-seq-len is {wanted}, wanted 2 to {limit}, the model's own limit")
    return wanted


def _contract(values: Sequence[ir.Value]) -> list[dict[str, Any]]:
    return [
        {
            "name": value.name,
            "dtype": value.dtype.numpy().name if value.dtype else None,
            "shape": [d if isinstance(d, int) else str(d.value) for d in value.shape or ()],
        }
        for value in values
    ]


def _kv_contract(model: ir.Model) -> dict[str, Any]:
    """KV buffers of the full tier: [batch, heads, max_seq_len, head_dim], one key and one value per layer."""
    keys = [
        v for v in model.graph.inputs if v.name and v.name.startswith("past_key_values.") and v.name.endswith(".key")
    ]
    shapes = {tuple(d if isinstance(d, int) else None for d in key.shape or ()) for key in keys}
    if len(shapes) != 1:
        raise ExportError(f"layers differ in the shape of their KV cache: {sorted(map(str, shapes))}")
    _, heads, _, head_dim = shapes.pop()
    if head_dim is None or head_dim % 16:
        raise UnsupportedModelError(
            f"attention heads of size {head_dim}: ONNX Runtime's CPU attention takes multiples of 16"
        )
    dtype = keys[0].dtype
    assert dtype is not None
    return {
        "past": "past_key_values.{layer}.{part}",
        "present": "present.{layer}.{part}",
        "parts": ["key", "value"],
        "num_layers": len(keys),
        "num_heads": heads,
        "head_dim": head_dim,
        "dtype": dtype.numpy().name,
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in ("via-sd-export", "mobius-onnx", "onnx-ir", "onnx", "onnxruntime", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@contextmanager
def _complete_or_nothing(target: Path) -> Iterator[Path]:
    """A temporary sibling of `target` that takes its name when the block ends well and vanishes when it does not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
