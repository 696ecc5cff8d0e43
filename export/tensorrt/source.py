"""What engines are made from: the decoders of a bundle, or of the checkpoints it was made from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from via_sd.contract.file_entries import difference
from via_sd.contract.graphs import DRAFTER, VERIFIER
from via_sd.contract.manifest import read_manifest
from via_sd.errors import ExportError
from via_sd.export.passes.lower import lower
from via_sd.export.sources.checkpoint import open_checkpoint
from via_sd.export.writer.weights import load_graph
from via_sd.masks import Mask, ModelIdentity, parse_mask
from via_sd.progress import Progress


@dataclass(frozen=True)
class Decoder:
    """One model of a bundle and the engines it gives.

    Attributes:
        name: `verifier` or `drafter`.
        engines: engine name -> the mask it prunes by, None for the model as it is.
        entry: its entry in the manifest (`graph`, `weights`, `kv`, `vocab_size`).
    """

    name: str
    engines: dict[str, Mask | None]
    entry: dict[str, Any]
    identity: ModelIdentity
    max_seq_len: int


@dataclass(frozen=True)
class Source:
    """A bundle as `build` sees it."""

    directory: Path
    manifest: dict[str, Any]
    decoders: tuple[Decoder, ...]

    @property
    def quantised(self) -> bool:
        return bool(self.manifest["precision"] != "fp32")

    @property
    def files(self) -> dict[str, str]:
        """sha256 of the graphs and weights the engines stand for, by path in the bundle."""
        names = [decoder.entry[key] for decoder in self.decoders for key in ("graph", "weights")]
        return {name: str(self.manifest["files"][name]["sha256"]) for name in names}


def read_source(directory: Path) -> Source:
    """Read the manifest of the bundle in `directory`.

    Raises:
        BundleError: no bundle there, a damaged one, or one of another version.
        ExportError: a mask that is called as a model drafter's engine is, or one with bridges or its own precision.
    """
    manifest = read_manifest(directory)
    tiers = {
        name: parse_mask(tier["mask"]) if "mask" in tier else None
        for name, tier in manifest["verifier"]["tiers"].items()
    }
    for name, mask in tiers.items():
        if mask is not None:
            _refuse_what_engines_lack(directory, name, mask.keeping(manifest["precision"]))
    identity = ModelIdentity.from_json(manifest["model"])
    decoders = [Decoder(VERIFIER, tiers, manifest["verifier"], identity, int(manifest["max_seq_len"]))]
    drafter = manifest["drafter"]
    if drafter["kind"] == "model":
        if DRAFTER in tiers:
            raise ExportError(
                f"a mask of this bundle is called '{DRAFTER}', as the model drafter's engine is; rename it"
            )
        identity = ModelIdentity.from_json(drafter["model"])
        decoders.append(Decoder(DRAFTER, {DRAFTER: None}, drafter, identity, int(drafter["max_seq_len"])))
    return Source(directory, manifest, tuple(decoders))


def _refuse_what_engines_lack(directory: Path, tier: str, mask: Mask) -> None:
    """Engines of a bundle leave sublayers out, and compute all others in one precision."""
    lacking = ["bridges"] if mask.bridges else []
    lacking += [f"sublayers or the LM head in {precision}" for precision in mask.precisions]
    if lacking:
        raise ExportError(
            f"tier {tier} of {directory} has {' and '.join(lacking)}, and engines have neither bridges nor a precision "
            "per tier; export a bundle whose masks only keep and skip to build engines from it"
        )


@contextlib.contextmanager
def open_decoder(
    source: Source, decoder: Decoder, reference: str | Path | None, progress: Progress
) -> Iterator[ir.Model]:
    """The lowered float32 graph of `decoder`: the bundle's own, or that of the checkpoint `reference`.

    Raises:
        ExportError: a quantised bundle without its checkpoint, another checkpoint, or a damaged bundle.
    """
    option = "--reference" if decoder.name == VERIFIER else "--drafter-reference"
    if reference is None:
        if source.quantised:
            raise ExportError(
                f"the {decoder.name}'s weights in {source.directory} are {source.manifest['precision']}, and engines "
                f"are built from unquantised ones; give the checkpoint they were made from with {option}"
            )
        for key in ("graph", "weights"):
            _check_file(source, decoder.entry[key])
        yield load_graph(source.directory / decoder.entry["graph"])
        return
    with open_checkpoint(reference, progress) as checkpoint:
        if checkpoint.identity != decoder.identity:
            found, wanted = checkpoint.identity.to_json(), decoder.identity.to_json()
            differing = [key for key in wanted if found[key] != wanted[key]]
            raise ExportError(
                f"{option} {reference} is another model than the bundle's {decoder.name}: "
                + ", ".join(f"{key} is {found[key]!r}, wanted {wanted[key]!r}" for key in differing)
            )
        if checkpoint.precision is not None:
            raise ExportError(
                f"{option} {reference} has {checkpoint.precision} weights, and engines are built from unquantised "
                "ones; give the checkpoint, or an ONNX decoder in float32"
            )
        lower(checkpoint.model, checkpoint.config, decoder.max_seq_len)
        yield checkpoint.model


def _check_file(source: Source, name: str) -> None:
    path = source.directory / name
    if difference(path, source.manifest["files"][name]) is not None:
        raise ExportError(f"{path} is missing or damaged; copy the bundle again, or export it again")
