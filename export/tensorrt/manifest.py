"""What a set of engines is made from and for, as engines.json keeps it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from via_sd.contract.engines_manifest import ENGINES_MANIFEST, FORMAT, VERSION, parse_engines_manifest
from via_sd.contract.file_entries import difference
from via_sd.errors import BundleError
from via_sd.export.portable import portable_dtype
from via_sd.export.tensorrt.source import Source
from via_sd.export.tensorrt.weights import Table, table_to_json
from via_sd.export.writer.weights import WEIGHTS_FILE

LOG, TIMING_CACHE = "build.log", "timing.cache"


@dataclass(frozen=True)
class Request:
    """Everything a set of engines depends on; engines.json keeps it, and an equal one is not built again.

    Attributes:
        library: `name` and `version` of the TensorRT library.
        platform: operating system and processor.
        made_by: version of this package.
        source: sha256 of the bundle's graphs and weights, by path.
        profiles: model (`verifier`, `drafter`) -> its optimisation profiles.
    """

    target: str
    library: dict[str, str]
    platform: str
    made_by: str
    source: dict[str, str]
    dtype: str
    profiles: dict[str, list[dict[str, Any]]]
    compute_capabilities: list[str]
    version_compatible: bool
    embed_weights: bool

    def key(self, model: str, graph: bytes, weights: Sequence[ir.TensorProtocol] = ()) -> str:
        """Name of everything one plan depends on; `weights` are those that become part of it."""
        relevant = asdict(self)
        for irrelevant in ("source", "made_by"):  # the graph says what became of them
            del relevant[irrelevant]
        relevant["profiles"] = self.profiles[model]
        digest = hashlib.sha256(json.dumps(relevant, sort_keys=True).encode())
        digest.update(graph)
        for tensor in weights:
            digest.update(tensor.tobytes())
        return digest.hexdigest()


def engines_manifest(
    source: Source, request: Request, rebuild: str, table: Table, engines: dict[str, Any], files: dict[str, Any]
) -> dict[str, Any]:
    """Contents of engines.json.

    Args:
        rebuild: what follows `via-sd-export build BUNDLE` to build these engines again.
        files: as `describe_files` gives them.
    """
    dtype = portable_dtype(request.dtype).numpy().name
    return {
        "format": FORMAT,
        "version": VERSION,
        "request": asdict(request),
        "rebuild": rebuild,
        "model": source.manifest["model"],
        "max_seq_len": {decoder.name: decoder.max_seq_len for decoder in source.decoders},
        "vocab_size": {decoder.name: int(decoder.entry["vocab_size"]) for decoder in source.decoders},
        "kv": {decoder.name: {**decoder.entry["kv"], "dtype": dtype} for decoder in source.decoders},
        "weights": {"file": WEIGHTS_FILE, "tensors": table_to_json(table)},
        "engines": engines,
        "files": files,
    }


def read_engines_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of the engines in `folder`; None if there are none that this release reads."""
    file = folder / ENGINES_MANIFEST
    try:
        return parse_engines_manifest(file.read_bytes(), file)
    except (OSError, BundleError):
        return None


def is_intact(folder: Path, manifest: dict[str, Any]) -> bool:
    """Whether every file that engines.json names is there, as it names it."""
    return all(difference(folder / name, entry) is None for name, entry in manifest["files"].items())
