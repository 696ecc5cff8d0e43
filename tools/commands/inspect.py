"""`via-sd-export inspect`: what a bundle, a mask, a policy or engines are, for people and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from via_sd.contract.engines_manifest import ENGINES_MANIFEST, parse_engines_manifest
from via_sd.contract.graphs import FULL
from via_sd.contract.kv import kv_bytes
from via_sd.files import read_json
from via_sd.masks import Mask, read_mask
from via_sd.runtime import Bundle, load_bundle
from via_sd.runtime.generation.policy_file import FOLDER, FORMAT
from via_sd.tools.commands.console import CommandError, command, out, print_json
from via_sd.tools.commands.options import AsJson


@command
def inspect(
    path: Annotated[
        Path, typer.Argument(help="Bundle directory, mask file, policy, or engines: their folder or one plan.")
    ],
    as_json: AsJson = False,
) -> None:
    """Show what a BUNDLE, a MASK, an ENGINE or a policy is; a bundle's files are checked against their hashes."""
    if not path.exists():
        raise CommandError(f"{path} does not exist; wanted a bundle directory, a mask file, a policy, or engines")
    if path.suffix == ".plan" or (path / ENGINES_MANIFEST).is_file():
        facts = _engine_facts(path)
    elif path.is_dir():
        facts = _bundle_facts(load_bundle(path))
    else:
        facts = _policy_facts(path) or _mask_facts(read_mask(path))
    if as_json:
        print_json(facts, ensure_ascii=False)
        return
    table = Table(show_header=False, box=None)
    for key, value in facts.items():
        if key == "tiers":
            value = "\n".join(f"{name}: {_describe(tier)}" for name, tier in value.items())
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
        "kv_bytes": kv_bytes(manifest),
        "tiers": _tier_facts(bundle),
        "slim": bundle.slim,
        "drafter": manifest["drafter"]["kind"],
        "engines": list(manifest.get("engines", {})),
        "policies": sorted(file.name for file in (bundle.path / FOLDER).glob("*.json")),
        "bytes": {name: entry["size"] for name, entry in manifest["files"].items()},
        "check": manifest.get("check"),
        "made_by": manifest.get("made_by"),
    }


def _tier_facts(bundle: Bundle) -> dict[str, dict[str, Any]]:
    """What each tier runs, and the bytes of weights that it reads and no tier before it; their share of full's."""
    tiers = bundle.manifest["verifier"]["tiers"]
    masks = bundle.masks
    facts: dict[str, dict[str, Any]] = {}
    for name, tier in tiers.items():
        mask, added = masks.get(name), tier["added_bytes"]
        runs = {"skip_ratio": 0.0} if mask is None else {"skip_ratio": mask.skip_ratio, **_state_facts(mask)}
        facts[name] = {**runs, "added_bytes": added, "added_share": added / max(1, tiers[FULL]["added_bytes"])}
    return facts


def _state_facts(mask: Mask) -> dict[str, Any]:
    return {"sublayers_in": dict(Counter(mask.states)), "head": mask.head}


def _describe(tier: dict[str, Any]) -> str:
    """One tier for people."""
    size = f"{tier['added_bytes'] / 1e6:,.1f} MB of weights"
    if "head" not in tier:
        return size
    states = ", ".join(f"{count} {state}" for state, count in tier["sublayers_in"].items())
    return f"{states} of the sublayers, head {tier['head']}; adds {size} ({tier['added_share']:.0%} of full's)"


def _engine_facts(path: Path) -> dict[str, Any]:
    """Of every engine in a folder, or of one plan."""
    file = path / ENGINES_MANIFEST if path.is_dir() else path.with_name(ENGINES_MANIFEST)
    manifest = parse_engines_manifest(file.read_bytes(), file)
    request, files = manifest["request"], manifest["files"]
    wanted = {name: e for name, e in manifest["engines"].items() if path.is_dir() or e["plan"] == path.name}
    if not wanted:
        raise CommandError(f"{file} does not list {path.name}")
    return {
        "kind": "engines",
        "version": manifest["version"],
        **{key: request[key] for key in ("target", "library", "platform", "dtype", "compute_capabilities")},
        "embed_weights": request["embed_weights"],
        "weights_bytes": files[manifest["weights"]["file"]]["size"],
        "engines": {
            name: {
                "plan": entry["plan"],
                "bytes": files[entry["plan"]]["size"],
                "build_seconds": entry["build_seconds"],
                "profiles": request["profiles"][entry["model"]],
            }
            for name, entry in wanted.items()
        },
    }


def _policy_facts(path: Path) -> dict[str, Any] | None:
    """Of a policy that `calibrate` wrote; None if the file is none."""
    try:
        found = read_json(path)
    except ValueError:
        return None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return None
    return {"kind": "policy", **{key: value for key, value in found.items() if key not in ("format", "measured")}}


def _mask_facts(mask: Mask) -> dict[str, Any]:
    return {
        "kind": "mask",
        "name": mask.name,
        "layers": mask.num_layers,
        "skip_ratio": mask.skip_ratio,
        "skipped_attention": [i for i, keep in enumerate(mask.keep_attention) if not keep],
        "skipped_mlp": [i for i, keep in enumerate(mask.keep_mlp) if not keep],
        "bridges": [[bridge.start, bridge.stop] for bridge in mask.bridges],
        **_state_facts(mask),
        "model": mask.model.to_json() if mask.model else None,
        "search": dict(mask.search),
    }
