"""Policies on disk: where a bundle keeps them, and whether one can be relied on."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from via_sd.contract.generation_options import GenerationConfig
from via_sd.contract.manifest import POLICY_FOLDER, Bundle
from via_sd.contract.values import NUMBER, OBJECT, TEXT, Contract, by_name, check, optional
from via_sd.errors import BundleError, ViaSdError
from via_sd.files import read_json
from via_sd.runtime.decoding.router import RouterMargins
from via_sd.runtime.engines.backends import ONNXRUNTIME
from via_sd.runtime.generation.machine import Machine, this_machine
from via_sd.runtime.generation.policy import Policy

FORMAT = "via-sd-policy"
#: 2: the cost of a slim pass by its length, not one share for all lengths.
VERSION = 2
FOLDER = POLICY_FOLDER
#: What is read of a policy, beside its router.
_CONTRACT: Contract = {
    "files": TEXT,
    "auto": OBJECT,
    "exact": TEXT,
    "costs": {"full": by_name(NUMBER), "slim": optional(by_name(NUMBER)), "draft": optional(NUMBER)},
}


def policy_file(bundle: Bundle, machine: Machine) -> Path:
    return bundle.path / FOLDER / f"{machine.key}.json"


def measured_files(bundle: Bundle, backend: str) -> str:
    """A digest of the files that were measured: the bundle's own, and the engines' where these run."""
    files: dict[str, Any] = {name: entry["xxh3"] for name, entry in bundle.manifest["files"].items()}
    if backend != ONNXRUNTIME:
        files |= bundle.manifest.get("engines", {})
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def find_policy(bundle: Bundle, backend: str, threads: int | None) -> Policy | None:
    """The policy that lies in `bundle` for this machine; None where it was not calibrated.

    One that cannot be relied on is not used: a warning names it.
    """
    if not (bundle.path / FOLDER).is_dir():
        return None
    file = policy_file(bundle, this_machine(backend, threads))
    if not file.exists():
        return None
    try:
        return read_policy(file, bundle, backend)
    except BundleError as error:
        warnings.warn(f"{error}; until then the defaults hold", stacklevel=2)
        return None


def read_policy(file: Path, bundle: Bundle, backend: str) -> Policy:
    """Read a policy.

    Raises:
        BundleError: one that is missing or damaged, or was measured with other files than `bundle` has.
    """
    try:
        data = read_json(file)
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it is no {FORMAT} version {VERSION}")
        check(data, _CONTRACT)
        if data["files"] != measured_files(bundle, backend):
            raise ValueError("it was measured with other files than the bundle has now")
        costs = data["costs"]
        full = _curve(costs["full"])
        slim = None if costs["slim"] is None else _curve(costs["slim"])
        router = _router(data.get("router"))
        auto = dict(data["auto"])
        GenerationConfig(**auto)  # raises for what no request may ask for
        return Policy(auto, data["exact"], full, slim, costs["draft"], router)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, ViaSdError) as error:
        reason = str(error) if isinstance(error, (OSError, ValueError)) else f"it is damaged: {error!r}"
        raise BundleError(f"{file} is an invalid policy ({reason}); measure again: via-sd-export calibrate") from None


def _curve(described: Mapping[str, Any]) -> dict[int, float]:
    return {int(tokens): float(cost) for tokens, cost in described.items()}


def _router(described: Mapping[str, Any] | None) -> RouterMargins | None:
    if described is None:
        return None
    margins = {float(share): float(margin) for share, margin in described["margins"].items()}
    return RouterMargins(float(described["max_divergence"]), margins)


def policy_json(bundle: Bundle, machine: Machine, policy: Policy, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Contents of a policy's file; `measured` is what it rests on, for people to read."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "files": measured_files(bundle, machine.backend),
        "machine": asdict(machine),
        "auto": dict(policy.auto),
        "exact": policy.exact,
        "router": None if policy.router is None else asdict(policy.router),
        "costs": {
            "full": dict(policy.full_cost),
            "slim": None if policy.slim_cost is None else dict(policy.slim_cost),
            "draft": policy.draft_cost,
        },
        "measured": dict(measured),
    }
