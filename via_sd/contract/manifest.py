"""bundle.json: what a bundle is made of; read, checked and written here alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from via_sd.contract.file_entries import check_listed, difference, resolved_within
from via_sd.contract.graphs import FULL, KEEP
from via_sd.contract.kv import KV
from via_sd.contract.model_settings import check_settings
from via_sd.contract.values import (
    BOOLEAN,
    BYTES,
    DIMENSION,
    LARGEST_DIMENSION,
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
    optional,
    whole,
)
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
#: Where policies lie, one for each machine.
POLICY_FOLDER = "policy"

_DECODER: Contract = {
    "graph": PATH,
    "weights": PATH,
    "vocab_size": DIMENSION,
    "kv": KV,
}
#: What is read of a manifest.
_CONTRACT: Contract = {
    "model": OBJECT,
    "precision": TEXT,
    "max_seq_len": DIMENSION,
    "tokenizer": {
        "eos_token_ids": list_of(whole(0, LARGEST_DIMENSION)),
        "special_tokens": by_name(TEXT),
        "chat_template": optional(TEXT),
    },
    "verifier": {**_DECODER, "tiers": {FULL: OBJECT}},
    "slim": optional(NAME),
    "drafter": {"kind": TEXT},
    "files": OBJECT,
}
_FILE: Contract = {"size": BYTES, "xxh3": TEXT}
_TIER: Contract = {"graph": PATH, KEEP.name: list_of(BOOLEAN), "added_bytes": BYTES}
_ENGINES: Contract = {"manifest": PATH, "sha256": TEXT}
_DRAFTERS: dict[str, Contract] = {
    "ngram": {},
    "mask": {"tier": NAME},
    "model": {**_DECODER, "max_seq_len": DIMENSION, "shared_vocab": whole(0, LARGEST_DIMENSION)},
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

    def graph(self, entry: Mapping[str, Any]) -> Path:
        """The graph of the verifier's or the drafter's `entry`; it and all beside it were checked.

        Raises:
            BundleError: the graph, its weights or another file of the graph's folder is not in the manifest.
        """
        graph, weights = self.file(entry["graph"]), self.file(entry["weights"])
        if weights.parent != graph.parent:
            raise BundleError(f"{weights} does not lie beside {graph}; export the bundle again")
        check_listed(
            graph.parent,
            {(self.path / name).name for name in self.manifest["files"] if (self.path / name).parent == graph.parent},
        )
        return graph


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
        if not resolved_within(directory, relative):
            raise BundleError(f"{directory / relative} lies outside the bundle, through a link; copy the bundle whole")
        _check_file(directory / relative, wanted, verify)
    return Bundle(directory, manifest)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of the bundle in `directory`, its files not looked at.

    Raises:
        BundleError: no bundle there, another format version, or a manifest that lacks what is read of it.
    """
    file = directory / MANIFEST
    if file.is_symlink():
        raise BundleError(f"{file} is a link, wanted the file itself; copy the bundle whole")
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
    """Raise `ValueError` unless everything that is read of a manifest is there, possible, and of one piece."""
    check(manifest, _CONTRACT)
    ModelIdentity.from_json(manifest["model"])
    check_keys(manifest["files"], PATH, "files")
    for name in manifest["files"]:
        check(manifest["files"], {name: _FILE}, "files.")
    _check_tiers(manifest["verifier"]["tiers"])
    tiers, drafter = manifest["verifier"]["tiers"], manifest["drafter"]
    if drafter["kind"] not in _DRAFTERS:
        raise ValueError(f"drafter.kind is {describe(drafter['kind'])}, this release knows {', '.join(_DRAFTERS)}")
    check(drafter, _DRAFTERS[drafter["kind"]], "drafter.")
    for what, name in (("slim", manifest["slim"]), ("drafter.tier", drafter.get("tier"))):
        if name is not None and "mask" not in tiers.get(name, {}):
            raise ValueError(f"{what} is {name!r}, and no tier of that name has a mask")
    settings = manifest.get("generation_config", {})
    check({"generation_config": settings}, {"generation_config": OBJECT})
    check_settings(settings)
    engines = manifest.get("engines", {})
    if not OBJECT.fits(engines):
        raise ValueError(f"engines is {describe(engines)}, wanted {OBJECT.wanted}")
    check_keys(engines, NAME, "engines")
    for target in engines:
        check(engines, {target: _ENGINES}, "engines.")


def _check_tiers(tiers: dict[str, Any]) -> None:
    check_keys(tiers, NAME, "verifier.tiers")
    for name, tier in tiers.items():
        if not OBJECT.fits(tier):
            raise ValueError(f"verifier.tiers.{name} is {describe(tier)}, wanted {OBJECT.wanted}")
        check(tier, _TIER, f"verifier.tiers.{name}.")
        if "mask" in tier:
            parse_mask(tier["mask"])
    flags = {name: len(tier[KEEP.name]) for name, tier in tiers.items()}
    if len(set(flags.values())) != 1:
        raise ValueError(f"verifier.tiers have different numbers of flags in keep: {flags}")


def _check_file(path: Path, entry: Mapping[str, Any], verify: bool) -> None:
    found = difference(path, entry, verify=verify)
    if found == "is missing":
        raise BundleError(f"{path} is missing; export the bundle again or copy it whole")
    if found is not None:
        raise BundleError(f"{path} {found}: it is damaged; copy or export the bundle again")
