"""What `calibrate` found for a bundle on a machine: forward pass latency there, and how `auto` decodes."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from via_sd.contract.manifest import Bundle
from via_sd.contract.mode_names import CALIBRATED, EXACT_MODES, MODES
from via_sd.errors import BundleError
from via_sd.runtime.decoding.router import RouterMargins
from via_sd.runtime.engines.backends import ON_CPU, ONNXRUNTIME
from via_sd.runtime.engines.tensorrt.cuda import Cuda

FORMAT = "via-sd-policy"
VERSION = 1
FOLDER = "policy"


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
        auto: the fastest mode, with fields of `GenerationConfig` that go with it where a request leaves them open.
        exact: the fastest exact mode, which `auto` means where `auto` would not be within a request's wishes.
        full_cost: time of a full pass over S tokens, in passes over one, by S.
        slim_cost: of a slim pass, in full passes over as many tokens; None without a slim-verifier.
        draft_cost: of one drafted token, in full passes over one; None for a drafter that runs no model.
        router: None where no divergence was allowed.
    """

    auto: Mapping[str, Any]
    exact: str
    full_cost: Mapping[int, float]
    slim_cost: float | None = None
    draft_cost: float | None = None
    router: RouterMargins | None = None

    def __post_init__(self) -> None:
        if self.auto["mode"] not in MODES or self.exact not in EXACT_MODES:
            raise ValueError(f"modes {self.auto['mode']!r} and {self.exact!r}")
        if self.auto.get("router") == CALIBRATED and self.router is None:
            raise ValueError("auto goes by a calibrated router, and there is none")
        costs = [*self.full_cost.values(), self.slim_cost or 1.0, self.draft_cost or 1.0]
        if 1 not in self.full_cost or len(self.full_cost) < 2 or not all(0 < cost < float("inf") for cost in costs):
            raise ValueError("costs that are none")

    def options_for(self, max_divergence: float | None, *, as_measured: bool) -> Mapping[str, Any]:
        """What `auto` means for a request: the measured mode, unless it is approximate and the request is not
        `as_measured` (greedy, without a penalty) or allows less divergence than was allowed.
        """
        limit = self.auto.get("max_divergence")
        fits = as_measured and (max_divergence is None or (limit is not None and limit <= max_divergence))
        return self.auto if self.auto["mode"] in EXACT_MODES or fits else {"mode": self.exact}


def this_machine(backend: str, threads: int | None) -> Machine:
    """The machine this process runs on."""
    return Machine(_cpu() if backend in ON_CPU else _gpu(), _cores(), backend, threads)


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
        data = json.loads(file.read_text(encoding="utf-8"))
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it is no {FORMAT} version {VERSION}")
        if data["files"] != measured_files(bundle, backend):
            raise ValueError("it was measured with other files than the bundle has now")
        costs = data["costs"]
        full = {int(tokens): float(cost) for tokens, cost in costs["full"].items()}
        router = _router(data.get("router"))
        return Policy(dict(data["auto"]), data["exact"], full, costs["slim"], costs["draft"], router)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error) if isinstance(error, (OSError, ValueError)) else f"it is damaged: {error!r}"
        raise BundleError(f"{file} is an invalid policy ({reason}); measure again: via-sd-export calibrate") from None


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
        "costs": {"full": dict(policy.full_cost), "slim": policy.slim_cost, "draft": policy.draft_cost},
        "measured": dict(measured),
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    """The processor's name; on Arm, where the kernel gives none, its makers' numbers."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    fields = [tuple(part.strip() for part in line.split(":", 1)) for line in lines if ":" in line]
    for wanted in (("model name",), ("CPU implementer", "CPU part", "CPU variant")):
        if found := sorted({f"{name} {value}" for name, value in fields if name in wanted}):
            return ", ".join(found).removeprefix("model name ")
    return platform.processor() or platform.machine()


def _gpu() -> str:
    try:
        return Cuda().name
    except BundleError:  # graphs run on a GPU without the Python package that could name it
        return f"a GPU beside {_cpu()}"
