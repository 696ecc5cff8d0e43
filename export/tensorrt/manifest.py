"""engines.json: what a set of engines was made from and for, and its entry in the bundle's manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from via_sd.export.portable import portable_dtype
from via_sd.export.tensorrt.source import Source, file_matches
from via_sd.export.tensorrt.weights import Table, table_to_json
from via_sd.export.writer.bundle import write_manifest
from via_sd.export.writer.weights import WEIGHTS_FILE

FORMAT = "via-sd-engines"
VERSION = 3
ENGINES_MANIFEST = "engines.json"
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
        files: as `hash_files` gives them.
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
        "files": {name: entry for name, entry in files.items() if name not in (LOG, TIMING_CACHE)},
    }


def describe_io(values: Sequence[ir.Value]) -> list[dict[str, Any]]:
    """Name, element type and shape of graph inputs or outputs."""
    return [
        {
            "name": value.name,
            "dtype": value.dtype.numpy().name if value.dtype else None,
            "shape": [d if isinstance(d, int) else str(d.value) for d in value.shape or ()],
        }
        for value in values
    ]


def write_engines_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
    (folder / ENGINES_MANIFEST).write_text(text, encoding="utf-8")


def read_engines_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of the engines in `folder`; None if there are none of this format."""
    try:
        manifest = json.loads((folder / ENGINES_MANIFEST).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    known = isinstance(manifest, dict) and (manifest.get("format"), manifest.get("version")) == (FORMAT, VERSION)
    return manifest if known else None


def is_intact(folder: Path, manifest: dict[str, Any]) -> bool:
    """Whether every file that engines.json names is there, as it names it."""
    return all(file_matches(folder / name, wanted) for name, wanted in manifest["files"].items())


def unregister(source: Source, target: str) -> None:
    """Take engines out of the bundle's manifest, before their files go: what it names is always there."""
    if target in source.manifest.get("engines", {}):
        del source.manifest["engines"][target]
        write_manifest(source.directory, source.manifest)


def register(source: Source, target: str, folder: Path) -> None:
    """Enter engines into the bundle's manifest."""
    content = (folder / ENGINES_MANIFEST).read_bytes()
    entry = {
        "manifest": (folder / ENGINES_MANIFEST).relative_to(source.directory).as_posix(),
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    source.manifest.setdefault("engines", {})[target] = entry
    write_manifest(source.directory, source.manifest)
