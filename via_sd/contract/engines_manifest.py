"""engines.json: what a set of engines was made from and for; read, checked and written here alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from via_sd.errors import BundleError
from via_sd.files import parse_json, write_json

FORMAT = "via-sd-engines"
VERSION = 3
READS_VERSIONS = (VERSION,)
ENGINES_MANIFEST = "engines.json"


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
    return found


def write_engines_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest of the engines in `folder` in one step."""
    write_json(folder / ENGINES_MANIFEST, manifest)
