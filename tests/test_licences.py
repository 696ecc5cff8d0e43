"""Everything that an installation brings has a licence that allows what ours (Apache-2.0) does, by its own metadata."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, requires

import pytest
from packaging.requirements import Requirement

#: Extras of what is shipped: tools for development and NVIDIA's own libraries are not.
EXTRAS = ("cpu", "export", "grammar", "search", "polygraphy", "triton")
ALLOWED = (
    "apache-2.0", "apache 2.0", "apache 2.0 license", "apache software license", "apache-2.0 with llvm-exception",
    "mit",
    "mit license", "mit-cmu", "bsd license", "bsd-2-clause", "bsd-3-clause", "3-clause bsd license", "0bsd", "bsl-1.0",
    "isc license", "isc", "iscl", "zlib", "cc0-1.0", "psf-2.0", "python software foundation license", "cnri-python",
    "mpl-2.0", "mozilla public license 2.0", "mpl 2.0", "zpl-2.1",
)  # fmt: skip
#: NVIDIA's binaries come under NVIDIA's terms; torch's own build decides whether they are there.
NVIDIA = re.compile(r"(nvidia|cuda|triton$)")


def installed(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> Iterator[Distribution]:
    """A distribution and what it needs, as far as that is installed here."""
    if (name, extras) in seen:
        return
    seen.add((name, extras))
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return
    yield found
    for text in requires(name) or ():
        needed = Requirement(text)
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield from installed(needed.name.lower(), frozenset(needed.extras), seen)


def licences(found: Distribution) -> list[str]:
    """What the metadata says: an SPDX expression, else classifiers, else free text."""
    said = found.metadata
    text = (said.get("License") or "").strip()
    classified = [c.split(" :: ")[-1] for c in said.get_all("Classifier") or () if c.startswith("License :: ")]
    whole = said.get("License-Expression") or " AND ".join(each for each in classified if each != "OSI Approved")
    whole = whole or (text.splitlines()[0] if text else "nothing")
    return [part.strip().lower() for part in re.split(r" AND | OR |[()]", whole) if part.strip()]


def test_every_dependency_has_a_licence_that_is_allowed() -> None:
    pytest.importorskip("mobius", reason="needs the export extra")
    brought = {found.metadata["Name"].lower(): found for found in installed("via-sd-export", frozenset(EXTRAS), set())}
    assert {"numpy", "tokenizers", "jinja2", "onnxruntime", "torch", "transformers", "optuna"} <= brought.keys()
    refused = {
        name: said
        for name, found in brought.items()
        if not NVIDIA.match(name) and (said := licences(found)) and not all(each in ALLOWED for each in said)
    }
    assert refused == {}
