"""The engines of a bundle on disk, checked before any of them is deserialised.

A library's own refusal of a plan comes late and says little; everything it would refuse is in the manifest, and each
mismatch is named here with the command that builds the engines again.
"""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from via_sd.contract.engines_manifest import parse_engines_manifest
from via_sd.contract.file_entries import difference, resolved_within
from via_sd.contract.manifest import Bundle
from via_sd.errors import BundleError
from via_sd.files import JSON_BYTES, read_regular
from via_sd.runtime.engines.trust import built_here


@dataclass(frozen=True)
class Host:
    """What engines are about to run on.

    Attributes:
        library: the library's Python module, `tensorrt_rtx` or `tensorrt`.
        version: the library's version.
        device: the GPU's name.
        compute_capability: such as "8.9".
    """

    library: str
    version: str
    device: str
    compute_capability: str


@dataclass(frozen=True)
class EngineFiles:
    """A checked set of engines: the bundle it belongs to, its folder and its manifest."""

    bundle: Path
    folder: Path
    manifest: dict[str, Any]

    @property
    def request(self) -> dict[str, Any]:
        request: dict[str, Any] = self.manifest["request"]
        return request

    @property
    def rebuild(self) -> str:
        """The command that builds these engines again."""
        return f"via-sd-export build {self.bundle} {self.manifest['rebuild']}"

    def engines_of(self, model: str) -> list[str]:
        """Names of the engines of `verifier` or `drafter`, highest rank first."""
        return [name for name, entry in self.manifest["engines"].items() if entry["model"] == model]

    def plan(self, engine: str) -> Path:
        return self.folder / str(self.manifest["engines"][engine]["plan"])


def read_engine_files(bundle: Bundle, target: str, *, trust: bool = False, verify: bool = True) -> EngineFiles:
    """Read and check the engines that `bundle` has for `target`.

    Args:
        trust: take plans that were not built on this machine.
        verify: compare every file's XXH3 with the manifest; sizes are always compared.

    Raises:
        BundleError: none built, damaged, made from other weights or by another release, or not trusted; the message
            has the command that builds them.
    """
    entry = bundle.manifest.get("engines", {}).get(target)
    build = f"via-sd-export build {bundle.path} --target {target}"
    if entry is None:
        raise BundleError(f"{bundle.path} has no engines for {target}; build them: {build}")
    file = bundle.path / entry["manifest"]
    if not resolved_within(bundle.path, entry["manifest"]):
        raise BundleError(f"{file} lies outside the bundle, through a link; build the engines again: {build}")
    try:
        content = read_regular(file, JSON_BYTES)
    except OSError:
        raise BundleError(f"{file} is missing; build the engines again: {build}") from None
    except ValueError as error:
        raise BundleError(f"{file} is corrupt ({error}); build the engines again: {build}") from None
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise BundleError(f"{file} is not the one the bundle names; build the engines again: {build}")
    manifest = parse_engines_manifest(content, file, f"build the engines again: {build}")
    files = EngineFiles(bundle.path, file.parent, manifest)
    for name, digest in files.request["source"].items():
        found = bundle.manifest["files"].get(name, {}).get("sha256")
        if found != digest:
            raise BundleError(
                f"the engines in {files.folder} were made from another {name} than this bundle has; "
                f"build them again: {files.rebuild}"
            )
    for name, wanted in manifest["files"].items():
        _check_file(files, name, wanted, verify)
    if not trust:
        _check_trust(files)
    return files


def check_host(files: EngineFiles, host: Host) -> None:
    """Raise `BundleError` unless the engines run with this library on this GPU."""
    request = files.request
    here = f"{platform.system().lower()}-{platform.machine()}"
    if request["platform"] != here:
        raise BundleError(
            f"the engines in {files.folder} are for {request['platform']}, this is {here}; "
            f"build them here: {files.rebuild}"
        )
    built = request["library"]
    if built["name"] != host.library or not _runs(built["version"], host.version, request["version_compatible"]):
        raise BundleError(
            f"the engines in {files.folder} were built with {built['name']} {built['version']}, installed is "
            f"{host.library} {host.version}; build them again: {files.rebuild}"
        )
    capabilities = request["compute_capabilities"]
    if capabilities and host.compute_capability not in capabilities:
        raise BundleError(
            f"the engines in {files.folder} are for compute capabilities {', '.join(capabilities)}, {host.device} has "
            f"{host.compute_capability}; build them for it: "
            f"{files.rebuild} --compute-capability {host.compute_capability}"
        )


def _runs(built: str, found: str, compatible: bool) -> bool:
    """Whether a plan of version `built` runs in version `found`: in itself alone, or in later ones of its major."""
    if built == found:
        return True
    if not compatible:
        return False
    old, new = ([int(part) for part in version.split(".")[:3] if part.isdigit()] for version in (built, found))
    return old[:1] == new[:1] and new >= old


def _check_file(files: EngineFiles, name: str, wanted: dict[str, Any], verify: bool) -> None:
    path = files.folder / name
    if difference(path, wanted, verify=verify) is not None:
        raise BundleError(f"{path} is missing or damaged; build the engines again: {files.rebuild}")


def _check_trust(files: EngineFiles) -> None:
    known = built_here()
    for name in files.manifest["engines"]:
        plan = files.plan(name)
        # The manifest's own digest proves nothing here: whoever wrote the plan wrote that too.
        if hashlib.sha256(plan.read_bytes()).hexdigest() not in known:
            raise BundleError(
                f"{plan} was not built on this machine, and an engine is code that runs; build it here: "
                f"{files.rebuild}; or, if you trust where it comes from, load it with trust_engines (--trust-engines)"
            )
