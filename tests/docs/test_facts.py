"""What pages list is what the code has: statistics, inputs and outputs, metrics, commands, packages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import via_sd
from tests.support import ROOT
from tests.support.documents import names_in, read, table_rows
from via_sd.contract.manifest import load_bundle
from via_sd.contract.mode_names import ROUTERS
from via_sd.contract.served_model import INPUTS, OUTPUTS
from via_sd.masks import OBJECTIVES, SCHEMA, SUBLAYER_STATES
from via_sd.runtime import Pipeline
from via_sd.runtime.triton.metrics import COUNTERS, GAUGES, PREFIX

#: Where the package under test lies: in the checkout, or where its wheel was installed.
PACKAGES = Path(via_sd.__file__).parent


def listed(document: str, heading: str) -> set[str]:
    """Names in the first column of the first table under a heading."""
    return {name for row in table_rows(document, heading) for name in names_in(row[0])}


def paths(data: Mapping[str, Any]) -> Iterator[str]:
    """Names of the values in nested objects, joined by points."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in paths(value))
        else:
            yield name


def test_statistics_documents_every_field_of_a_completion(tiny_bundle):
    completion = Pipeline.load(tiny_bundle, threads=1).generate("Hello", mode="routed", max_new_tokens=4, logprobs=0)
    found = completion.to_json()
    assert listed("docs/statistics.md", "## Completion") == set(found)
    documented = {
        name for part in ("Divergence", "Counts", "Times") for name in listed("docs/statistics.md", f"## {part}")
    }
    assert documented == set(paths(found["stats"]))


def test_bundle_documents_every_key_of_the_manifest_and_every_tensor_of_the_graphs(tiny_bundle):
    manifest = load_bundle(tiny_bundle).manifest
    assert listed("docs/bundle.md", "## Manifest") == set(manifest)
    for part, documented in (
        ("inputs", listed("docs/bundle.md", "### Inputs")),
        ("outputs", listed("docs/bundle.md", "### Outputs")),
    ):
        names = {re.sub(r"\.\d+\.(key|value)$", ".{layer}.key", each["name"]) for each in manifest["verifier"][part]}
        assert documented - {".value"} == names


def test_masks_documents_every_key_of_the_file_and_every_objective():
    assert listed("docs/masks.md", "## The file") == set(SCHEMA["anyOf"][0]["properties"])
    states = {name for row in table_rows("docs/masks.md", "## The file", 1) for name in names_in(row[0])}
    assert states == set(SUBLAYER_STATES)
    assert listed("docs/masks.md", "## What is scored") == set(OBJECTIVES)


def test_router_documents_every_router():
    assert listed("docs/router.md", "## The three routers") == set(ROUTERS)


def test_triton_documents_every_input_and_output():
    assert listed("docs/triton.md", "## Inputs") == {spec.name for spec in INPUTS}
    assert listed("docs/triton.md", "## Outputs") == {spec.name for spec in OUTPUTS}


def test_triton_documents_every_metric():
    documented = {name.partition("{")[0] for name in listed("docs/triton.md", "## Metrics")}
    assert documented == {PREFIX + name for name in (*COUNTERS, *GAUGES)}


@pytest.mark.parametrize("package", ["export", "runtime", "tools"])
def test_the_plan_of_the_packages_shows_every_room(package):
    drawn = set(re.findall(r'class="room"[^>]*>([^<]+)<', (ROOT / "docs/images/rooms.svg").read_text()))
    rooms = {path.parent.name for path in (PACKAGES / package).glob("*/__init__.py")} - {"benchmarks"}
    assert rooms
    assert rooms <= drawn


def test_the_glossary_is_sorted_and_has_each_term_once():
    terms = [row[0] for row in table_rows("docs/glossary.md", "# Glossary")]
    assert terms == sorted(terms, key=str.lower)
    assert len({term.split(",")[0] for term in terms}) == len(terms)


def test_architecture_names_files_that_exist():
    named = set(re.findall(r"`((?:export|runtime|masks|tools|tests|via_sd)/[\w./]+)`", read("docs/architecture.md")))
    assert "runtime/decoding/drafters/protocol.py" in named
    for path in named:
        assert (ROOT / path).exists() or (PACKAGES / path.removeprefix("via_sd/")).exists(), path
