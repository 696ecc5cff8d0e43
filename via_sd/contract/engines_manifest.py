"""engines.json: what a set of engines was made from and for; read, checked and written here alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from via_sd.contract.graphs import DRAFTER, VERIFIER
from via_sd.contract.kv import KV
from via_sd.contract.values import (
    BOOLEAN,
    BYTES,
    DIMENSION,
    LIST,
    NAME,
    OBJECT,
    PATH,
    TEXT,
    Contract,
    by_name,
    check,
    check_keys,
    describe,
    list_of,
    one_of,
)
from via_sd.errors import BundleError
from via_sd.files import parse_json, write_json

FORMAT = "via-sd-engines"
VERSION = 3
READS_VERSIONS = (VERSION,)
ENGINES_MANIFEST = "engines.json"

#: What is read of engines.json besides the entries of single models, engines and files.
_CONTRACT: Contract = {
    "request": {
        "target": TEXT,
        "library": {"name": TEXT, "version": TEXT},
        "platform": TEXT,
        "source": by_name(TEXT),
        "dtype": TEXT,
        "profiles": OBJECT,
        "compute_capabilities": list_of(TEXT),
        "version_compatible": BOOLEAN,
        "embed_weights": BOOLEAN,
    },
    "rebuild": TEXT,
    "max_seq_len": OBJECT,
    "vocab_size": OBJECT,
    "kv": {VERIFIER: OBJECT},
    "weights": {"file": NAME, "tensors": OBJECT},
    "engines": OBJECT,
    "files": OBJECT,
}


def parse_engines_manifest(content: bytes, file: Path, remedy: str = "build the engines again") -> dict[str, Any]:
    """What an engines.json `file` of this `content` says; raises `BundleError` for one that this release does not read.

    Args:
        remedy: what a user should do about that.
    """
    try:
        manifest = parse_json(content)
    except ValueError as error:
        raise BundleError(f"{file} is corrupt ({error}); {remedy}") from None
    found: dict[str, Any] = manifest if isinstance(manifest, dict) else {}
    if found.get("format") != FORMAT or found.get("version") not in READS_VERSIONS:
        raise BundleError(
            f"{file} is {found.get('format')} version {found.get('version')!r}, this release reads {FORMAT} "
            f"{', '.join(map(str, READS_VERSIONS))}; {remedy}"
        )
    try:
        _check_contract(found)
    except ValueError as error:
        raise BundleError(f"{file} is damaged: {error}; {remedy}") from None
    return found


def _check_contract(manifest: dict[str, Any]) -> None:
    """Raise `ValueError` unless everything that is read of the manifest is there and possible."""
    check(manifest, _CONTRACT)
    files, engines = manifest["files"], manifest["engines"]
    check_keys(files, PATH, "files")
    check_keys(engines, NAME, "engines")
    for name in files:
        check(files, {name: {"size": BYTES, "xxh3": TEXT}}, "files.")
    models = [key for key in (VERIFIER, DRAFTER) if key in manifest["kv"]]
    for model in models:
        for key, kind in (("kv", KV), ("vocab_size", DIMENSION), ("max_seq_len", DIMENSION)):
            check(manifest[key], {model: kind}, f"{key}.")
        check(manifest["request"]["profiles"], {model: LIST}, "request.profiles.")
    opened = [manifest["weights"]["file"]]
    for name, engine in engines.items():
        check(engines, {name: {"model": one_of(*models), "plan": NAME, "graph": NAME}}, "engines.")
        opened += [engine["plan"], engine["graph"]]
    for name in opened:
        if name not in files:
            raise ValueError(f"files does not list {describe(name)}")


def write_engines_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest of the engines in `folder` in one step."""
    write_json(folder / ENGINES_MANIFEST, manifest)
