"""bundle.json: what a bundle is made of; read, checked and written here alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from via_sd.contract.file_entries import difference
from via_sd.contract.graphs import FULL, KEEP
from via_sd.contract.model_settings import check_settings
from via_sd.errors import BundleError, MaskError
from via_sd.files import read_json, write_json
from via_sd.masks import Mask, ModelIdentity, parse_mask

FORMAT = "via-sd-bundle"
VERSION = 2
#: Versions this release reads. A minor change adds optional keys under the same version; a change that would be
#: misread gets the next version, and the release that makes it says how to export again.
READS_VERSIONS = (VERSION,)
MANIFEST = "bundle.json"
TOKENIZER_FILE = "tokenizer.json"
#: Where engines lie, a folder for each target.
ENGINES_FOLDER = "engines"

#: What is read of a decoder's entry, and its type.
_DECODER: dict[str, Any] = {
    "graph": str,
    "vocab_size": int,
    "kv": {
        "past": str,
        "present": str,
        "parts": list,
        "num_layers": int,
        "num_heads": int,
        "head_dim": int,
        "dtype": str,
    },
}
#: What is read of a manifest, and its type; tuples are alternatives.
_CONTRACT: dict[str, Any] = {
    "model": dict,
    "precision": str,
    "max_seq_len": int,
    "tokenizer": {"eos_token_ids": list, "special_tokens": dict, "chat_template": (str, NoneType)},
    "verifier": {**_DECODER, "tiers": {FULL: {KEEP.name: list}}},
    "slim": (str, NoneType),
    "drafter": {"kind": str},
    "files": dict,
}
_DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {},
    "mask": {"tier": str},
    "model": {**_DECODER, "max_seq_len": int, "shared_vocab": int},
}


@dataclass(frozen=True)
class Bundle:
    """A checked bundle: its directory and the decoded manifest."""

    path: Path
    manifest: dict[str, Any]

    @property
    def identity(self) -> ModelIdentity:
        return ModelIdentity.from_json(self.manifest["model"])

    @property
    def precision(self) -> str:
        return str(self.manifest["precision"])

    @property
    def max_seq_len(self) -> int:
        return int(self.manifest["max_seq_len"])

    @property
    def slim(self) -> str | None:
        """Name of the slim-verifier's tier, None if the bundle was exported without a mask."""
        name = self.manifest["slim"]
        return None if name is None else str(name)

    @property
    def masks(self) -> dict[str, Mask]:
        """Mask of every pruned tier, by tier name."""
        tiers = self.manifest["verifier"]["tiers"]
        return {name: parse_mask(tier["mask"]) for name, tier in tiers.items() if "mask" in tier}

    def file(self, relative: str) -> Path:
        """A file of the bundle; raises `BundleError` for one that was not checked when the bundle was loaded."""
        if relative not in self.manifest["files"]:
            raise BundleError(f"{self.path / MANIFEST} does not list {relative}; export the bundle again")
        return self.path / relative


def load_bundle(path: str | Path, *, verify: bool = True) -> Bundle:
    """Read the bundle at `path`.

    Args:
        verify: compare every file's size and XXH3 with the manifest (a few gigabytes per second); sizes are always
            compared.

    Raises:
        BundleError: no bundle there, another format version, or a file that is missing, cut or changed.
    """
    directory = Path(path)
    manifest = read_manifest(directory)
    for relative, wanted in manifest["files"].items():
        _check_file(directory / relative, wanted, verify)
    return Bundle(directory, manifest)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of the bundle in `directory`, its files not looked at.

    Raises:
        BundleError: no bundle there, another format version, or a manifest that lacks what is read of it.
    """
    file = directory / MANIFEST
    try:
        manifest = read_json(file)
    except (FileNotFoundError, NotADirectoryError):
        raise BundleError(
            f"{directory} is no bundle: it has no {MANIFEST}; make one with via-sd-export export"
        ) from None
    except OSError as error:
        raise BundleError(f"cannot read {file}: {error.strerror or error}") from None
    except ValueError as error:
        raise BundleError(f"{file} is corrupt ({error}); export the bundle again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BundleError(f"{file} is not a manifest of format {FORMAT}; export the bundle again")
    if manifest.get("version") not in READS_VERSIONS:
        raise BundleError(
            f"{directory} has bundle version {manifest.get('version')!r}, this release reads "
            f"{', '.join(map(str, READS_VERSIONS))}; export it again with this release, or use the one that made it"
        )
    try:
        _check_contract(manifest)
    except (ValueError, MaskError) as error:
        raise BundleError(f"{file} is damaged: {error}; export the bundle again") from None
    return manifest


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write or replace the manifest of the bundle in `directory` in one step."""
    write_json(directory / MANIFEST, manifest)


def set_engines(directory: Path, target: str, manifest: Path | None) -> None:
    """Enter the engines for `target` into the manifest of the bundle in `directory`, or take them out of it.

    Args:
        manifest: the engines' own manifest, below `directory`; None takes them out.
    """
    bundle = read_manifest(directory)
    engines = bundle.setdefault("engines", {})
    if manifest is not None:
        content = manifest.read_bytes()
        engines[target] = {
            "manifest": manifest.relative_to(directory).as_posix(),
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    elif engines.pop(target, None) is None:
        return
    write_manifest(directory, bundle)


def _check_contract(manifest: dict[str, Any]) -> None:
    """Raise `ValueError` unless everything that is read of a manifest is there and of its type."""
    _check(manifest, _CONTRACT, "")
    ModelIdentity.from_json(manifest["model"])
    tiers, drafter = manifest["verifier"]["tiers"], manifest["drafter"]
    for name, tier in tiers.items():
        _check(tiers, {name: {KEEP.name: list, "added_bytes": int}}, "verifier.tiers.")
        if "mask" in tier:
            parse_mask(tier["mask"])
    if drafter["kind"] not in _DRAFTERS:
        raise ValueError(f"drafter.kind is {drafter['kind']!r}, this release knows {', '.join(_DRAFTERS)}")
    _check(drafter, _DRAFTERS[drafter["kind"]], "drafter.")
    for what, name in (("slim", manifest["slim"]), ("drafter.tier", drafter.get("tier"))):
        if name is not None and "mask" not in tiers.get(name, {}):
            raise ValueError(f"{what} is {name!r}, and no tier of that name has a mask")
    settings = manifest.get("generation_config", {})
    _check({"generation_config": settings}, {"generation_config": dict}, "")
    check_settings(settings)
    for name in manifest["files"]:
        _check(manifest["files"], {name: {"size": int, "xxh3": str}}, "files.")


def _check(data: dict[str, Any], contract: Mapping[str, Any], where: str) -> None:
    for key, wanted in contract.items():
        if key not in data:
            raise ValueError(f"{where}{key} is missing")
        kind = dict if isinstance(wanted, dict) else wanted
        if not isinstance(data[key], kind):
            raise ValueError(f"{where}{key} is {str(data[key])[:40]!r}, which is no {_name(kind)}")
        if isinstance(wanted, dict):
            _check(data[key], wanted, f"{where}{key}.")


def _name(kind: Any) -> str:
    return " or ".join(k.__name__ for k in kind) if isinstance(kind, tuple) else str(kind.__name__)


def _check_file(path: Path, entry: Mapping[str, Any], verify: bool) -> None:
    found = difference(path, entry, verify=verify)
    if found == "is missing":
        raise BundleError(f"{path} is missing; export the bundle again or copy it whole")
    if found is not None:
        raise BundleError(f"{path} {found}: it is damaged; copy or export the bundle again")
