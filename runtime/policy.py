"""What calibration found for a bundle on a machine: what passes cost there, and how `auto` decodes."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from via_sd.runtime.backends import ON_CPU
from via_sd.runtime.bundle import Bundle
from via_sd.runtime.errors import BundleError
from via_sd.runtime.modes import MODES
from via_sd.runtime.tensorrt.cuda import Cuda

FORMAT = "via-sd-policy"
VERSION = 1
FOLDER = "policy"
_AGAIN = "measure again: via-sd-export calibrate"


@dataclass(frozen=True)
class Machine:
    """What a measurement holds for.

    Attributes:
        processor: the name of the CPU, or of the GPU where that runs the graphs.
        cores: logical cores this process may use.
        backend: one of `BACKENDS`.
        threads: threads of one pass as they were asked for.
    """

    processor: str
    cores: int
    backend: str
    threads: int | None

    @property
    def key(self) -> str:
        """Name of the policy's file: readable, and different for machines that differ."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        threads = "all" if self.threads is None else str(self.threads)
        return f"{platform.machine()}-{self.cores}cores-{self.backend}-{threads}threads-{digest}"


@dataclass(frozen=True)
class Policy:
    """A calibration's result.

    Attributes:
        mode: what `auto` means.
        options: fields of `GenerationConfig` that go with it where a request leaves them open.
        full_cost: time of a full pass over S tokens, in passes over one, by S.
        slim_cost: of a slim pass, in full passes over as many tokens; None without a slim-verifier.
        draft_cost: of one drafted token, in full passes over one; None for a drafter that runs no model.
    """

    mode: str
    options: Mapping[str, Any]
    full_cost: Mapping[int, float]
    slim_cost: float | None
    draft_cost: float | None


def this_machine(backend: str, threads: int | None) -> Machine:
    """The machine this process runs on."""
    return Machine(_cpu() if backend in ON_CPU else _gpu(), len(os.sched_getaffinity(0)), backend, threads)


def policy_file(bundle: Bundle, machine: Machine) -> Path:
    return bundle.path / FOLDER / f"{machine.key}.json"


def bundle_digest(bundle: Bundle) -> str:
    """Names what was measured: the bundle's files, whatever else was put beside them since."""
    files = {name: entry["xxh3"] for name, entry in bundle.manifest["files"].items()}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def read_policy(bundle: Bundle, machine: Machine) -> Policy | None:
    """The policy of `bundle` for `machine`; None where it was not calibrated.

    Raises:
        BundleError: a policy that is damaged, or was measured with other files than the bundle has.
    """
    file = policy_file(bundle, machine)
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BundleError(f"cannot read {file} ({error}); delete it or {_AGAIN} {bundle.path}") from None
    if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (FORMAT, VERSION):
        raise BundleError(f"{file} is no {FORMAT} version {VERSION}; delete it or {_AGAIN} {bundle.path}")
    if data["bundle"] != bundle_digest(bundle):
        raise BundleError(f"{file} was measured with other files than {bundle.path} has now; {_AGAIN} {bundle.path}")
    auto, costs = data["auto"], data["costs"]
    if auto["mode"] not in MODES:
        raise BundleError(f"{file} chooses mode {auto['mode']!r}, modes are {', '.join(MODES)}; {_AGAIN} {bundle.path}")
    return Policy(
        auto["mode"],
        auto["options"],
        {int(tokens): cost for tokens, cost in costs["full"].items()},
        costs["slim"],
        costs["draft"],
    )


def policy_json(bundle: Bundle, machine: Machine, policy: Policy, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Contents of a policy's file; `measured` is what it rests on, for people to read."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "bundle": bundle_digest(bundle),
        "machine": asdict(machine),
        "auto": {"mode": policy.mode, "options": dict(policy.options)},
        "costs": {"full": dict(policy.full_cost), "slim": policy.slim_cost, "draft": policy.draft_cost},
        "measured": dict(measured),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpu() -> str:
    try:
        return Cuda().name
    except BundleError:  # graphs run on a GPU without the Python package that could name it
        return f"a GPU beside {_cpu()}"
