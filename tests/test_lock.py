"""The lock that CI can install from has every package that the project asks for, in a version that it accepts."""

from __future__ import annotations

import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support import ROOT

#: Extras that are installed together; those for a GPU exclude `cpu`.
LOCKED = ("cpu", "export", "grammar", "search", "polygraphy", "triton", "tensorrt-rtx", "dev", "docs")
_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(\S+)", re.MULTILINE)


def locked() -> dict[str, Version]:
    text = (ROOT / "requirements/ci.txt").read_text(encoding="utf-8")
    return {canonicalize_name(name): Version(version) for name, version in _PIN.findall(text)}


def test_every_package_that_is_asked_for_is_locked_in_a_version_that_is_accepted() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(text) for part in (project["dependencies"], *map(extras.get, LOCKED)) for text in part]
    assert len(wanted) > 30
    found = locked()
    missing = [str(each) for each in wanted if canonicalize_name(each.name) not in found]
    assert not missing, f"not locked: {missing}; make lock"
    refused = [f"{each}: {found[canonicalize_name(each.name)]}" for each in wanted
               if not each.specifier.contains(found[canonicalize_name(each.name)])]  # fmt: skip
    assert not refused, f"locked in a version that pyproject.toml does not accept: {refused}; make lock"


def test_every_locked_package_has_a_hash() -> None:
    lines = (ROOT / "requirements/ci.txt").read_text(encoding="utf-8").splitlines()
    pins = [index for index, line in enumerate(lines) if "==" in line]
    assert len(pins) > 80
    assert all(lines[index + 1].lstrip().startswith("--hash=sha256:") for index in pins)
