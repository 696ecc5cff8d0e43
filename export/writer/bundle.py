"""Write a bundle: graphs of every tier over one weights file, tokenizer, manifest (docs/bundle.md)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from via_sd.contract.file_entries import describe_files
from via_sd.contract.graphs import DRAFTER, VERIFIER
from via_sd.contract.manifest import FORMAT, MANIFEST, VERSION, write_manifest
from via_sd.errors import ExportError
from via_sd.export.sources.checkpoint import Checkpoint, open_checkpoint
from via_sd.export.writer.decoder import write_decoder
from via_sd.export.writer.generation_config import read_generation_config
from via_sd.export.writer.limits import capacity
from via_sd.export.writer.precision import activations_of, check_precision, precision_of
from via_sd.export.writer.tiers import check_nesting, check_precisions, drafter_mask, resolve_mask, slim_in_precision
from via_sd.export.writer.tokenizer import export_tokenizer
from via_sd.export.writer.vocabulary import check_vocabularies
from via_sd.files import whole_directory
from via_sd.masks import Mask, MaskFormat
from via_sd.progress import Progress, no_progress, prefixed


def export_bundle(
    verifier: str | Path,
    out: str | Path,
    *,
    masks: Sequence[Mask | str | Path] = (),
    mask_format: MaskFormat | None = None,
    drafter: str = "ngram",
    precision: str | None = None,
    slim_precision: str | None = None,
    activations: str | None = None,
    max_seq_len: int | None = None,
    chat_template: str | Path | None = None,
    check: bool = True,
    progress: Progress = no_progress,
) -> Path:
    """Export `verifier` and its tiers to the bundle directory `out`.

    Args:
        verifier: Hugging Face directory, hub id, GGUF file, or directory with an ONNX decoder of the ONNX Runtime GenAI
            model builder.
        out: directory to create; it appears when everything in it is complete.
        masks: masks or mask files; the first is the slim-verifier.
        mask_format: what a bare array in a mask file means.
        drafter: `ngram`, `mask:FILE` (a deeper mask of the verifier), or another model with the same vocabulary.
        precision: `fp32`; `fp16` or `bf16`, which activations and KV are in, too; or weight-only `int8` or `int4`
            (blocks of 32, symmetric); by default what the weights are in an ONNX decoder, and `fp32` otherwise.
        slim_precision: of what the slim-verifier keeps, its LM head included: `int8` or `int4`; without masks the
            slim-verifier is then the whole model in that precision. Masks can say it of each sublayer.
        activations: of activations and KV with weights in `int8` or `int4`: `fp32` (default) or `fp16`.
        max_seq_len: capacity of a KV buffer in tokens; the model's limit or 4096, whichever is less, by default.
        chat_template: file with a Jinja chat template to take instead of the model's.
        check: compare with transformers on the checkpoint, or with the ONNX decoder as it came, before the bundle is
            completed.

    Returns:
        `out` as a path.

    Raises:
        ExportError: bad arguments or input, or a bundle that does not compute what the checkpoint does.
        MaskError: a mask that cannot be read or does not fit.
        DiskSpaceError: the weights do not fit on the disk.
        FileExistsError: another run is writing `out`, or has written it in the meantime.
    """
    target = Path(out)
    if target.exists():
        raise ExportError(f"{target} exists; remove it or choose another --out")
    check_precision(precision)
    with whole_directory(target) as directory, open_checkpoint(verifier, progress) as source:
        precision = precision_of(precision, source, str(verifier))
        computed_in = activations_of(activations, precision, source)
        tiers = [resolve_mask(mask, source.identity, mask_format) for mask in masks]
        if slim_precision is not None:
            tiers = slim_in_precision(tiers, slim_precision, precision, source.identity)
        deepest = drafter_mask(drafter, source.identity, mask_format)
        limit = capacity(max_seq_len, source.config)
        (directory / VERIFIER).mkdir()
        template = Path(chat_template) if chat_template is not None else None
        tokenizer = export_tokenizer(source.directory, directory, source.config, template)
        every = tiers + ([deepest] if deepest else [])
        check_nesting(every)
        for mask in every:
            quantised = source.precision is not None
            check_precisions(mask, precision, quantised_source=quantised, activations=computed_in)
        decoder = write_decoder(source, directory / VERIFIER, every, precision, computed_in, limit, check, progress)
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "model": source.identity.to_json(),
            "precision": precision,
            "max_seq_len": limit,
            "tokenizer": tokenizer,
            "generation_config": read_generation_config(source.directory),
            "verifier": decoder.manifest,
            "slim": tiers[0].name if tiers else None,
            "drafter": {"kind": "ngram"},
            "check": decoder.check,
            "made_by": _versions(),
        }
        if deepest:
            manifest["drafter"] = {"kind": "mask", "tier": deepest.name}
        elif drafter != "ngram":
            manifest["drafter"] = _write_drafter(
                drafter, directory, source, precision, computed_in, limit, check, progress
            )
        progress("hashing", None)
        manifest["files"] = describe_files(directory, leave_out=[MANIFEST])
        write_manifest(directory, manifest)
    return target


def _write_drafter(
    drafter: str,
    directory: Path,
    verifier: Checkpoint,
    precision: str,
    activations: str,
    max_seq_len: int,
    check: bool,
    progress: Progress,
) -> dict[str, Any]:
    """Write the model `drafter` to the bundle in `directory`; its entry in the manifest."""
    with open_checkpoint(drafter, prefixed(progress, DRAFTER)) as source:
        shared = check_vocabularies(verifier.directory, source.directory, verifier.config, source.config)
        (directory / DRAFTER).mkdir()
        precision_of(precision, source, drafter)
        activations_of(activations, precision, source)
        limit = min(max_seq_len, capacity(None, source.config, at_most=max_seq_len))
        decoder = write_decoder(source, directory / DRAFTER, [], precision, activations, limit, check, progress)
        return {
            "kind": "model",
            "model": source.identity.to_json(),
            "max_seq_len": limit,
            "shared_vocab": shared,
            **{k: v for k, v in decoder.manifest.items() if k not in ("segments", "tiers")},
        }


def _versions() -> dict[str, str]:
    found = {}
    for name in ("via-sd-export", "mobius-onnx", "onnx-ir", "onnx", "onnxruntime", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
