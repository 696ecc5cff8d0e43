"""`via-sd-export inspect`: what a bundle or a mask is, for people and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from via_sd.masks import Mask, read_mask
from via_sd.runtime import Bundle, load_bundle
from via_sd.runtime.policy import FOLDER
from via_sd.tools.console import CommandError, command, out, print_json
from via_sd.tools.options import AsJson


@command
def inspect(
    path: Annotated[Path, typer.Argument(help="Bundle directory or mask file.")],
    as_json: AsJson = False,
) -> None:
    """Show what a BUNDLE or a MASK is; a bundle's files are checked against their hashes."""
    if not path.exists():
        raise CommandError(f"{path} does not exist; wanted a bundle directory or a mask file")
    facts = _bundle_facts(load_bundle(path)) if path.is_dir() else _mask_facts(read_mask(path))
    if as_json:
        print_json(facts, ensure_ascii=False)
        return
    table = Table(show_header=False, box=None)
    for key, value in facts.items():
        if key == "tiers":
            value = ", ".join(f"{name} ({share:.0%} of the layers skipped)" for name, share in value.items())
        table.add_row(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    out.print(table)


def _bundle_facts(bundle: Bundle) -> dict[str, Any]:
    manifest = bundle.manifest
    return {
        "kind": "bundle",
        "version": manifest["version"],
        "model": manifest["model"],
        "precision": bundle.precision,
        "max_seq_len": bundle.max_seq_len,
        "tiers": {"full": 0.0, **{name: mask.skip_ratio for name, mask in bundle.masks.items()}},
        "slim": bundle.slim,
        "drafter": manifest["drafter"]["kind"],
        "engines": list(manifest.get("engines", {})),
        "policies": sorted(file.name for file in (bundle.path / FOLDER).glob("*.json")),
        "bytes": {name: entry["size"] for name, entry in manifest["files"].items()},
        "check": manifest["check"],
        "made_by": manifest["made_by"],
    }


def _mask_facts(mask: Mask) -> dict[str, Any]:
    return {
        "kind": "mask",
        "name": mask.name,
        "layers": mask.num_layers,
        "skip_ratio": mask.skip_ratio,
        "skipped_attention": [i for i, keep in enumerate(mask.keep_attention) if not keep],
        "skipped_mlp": [i for i, keep in enumerate(mask.keep_mlp) if not keep],
        "model": mask.model.to_json() if mask.model else None,
        "search": dict(mask.search),
    }
