"""What a manifest says of files is held to the files; engines enter a bundle's manifest and leave it."""

from __future__ import annotations

import hashlib
import os
import shutil

import pytest

from via_sd.contract.file_entries import describe_file, describe_files, difference
from via_sd.contract.manifest import load_bundle, read_manifest, set_engines


def test_every_file_below_a_directory_is_described(tmp_path):
    (tmp_path / "inner").mkdir()
    for name in ("a", "inner/b", "manifest.json", "inner/manifest.json"):
        (tmp_path / name).write_bytes(name.encode() * 1000)
    found = describe_files(tmp_path, leave_out=["manifest.json"])
    assert list(found) == ["a", "inner/b"]
    content = b"inner/b" * 1000
    assert found["inner/b"]["size"] == len(content)
    assert found["inner/b"]["sha256"] == hashlib.sha256(content).hexdigest()


def test_a_file_that_is_not_the_one_described_is_told_apart(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"content")
    entry = describe_file(file)
    assert difference(file, entry) is None
    file.write_bytes(b"CONTENT")
    assert difference(file, entry, verify=False) is None
    assert str(difference(file, entry)).startswith("is changed (XXH3 ")
    file.write_bytes(b"contents")
    assert difference(file, entry, verify=False) == "has 8 bytes, wanted 7"
    file.unlink()
    assert difference(file, entry, verify=False) == "is missing"


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["directory", "fifo"])
def test_what_is_no_file_is_not_read(make, tmp_path):
    make(tmp_path / "file")
    assert difference(tmp_path / "file", {"size": 0, "xxh3": ""}) == "is not a file"


def test_engines_enter_the_manifest_of_a_bundle_and_leave_it(tiny_bundle, tmp_path):
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    before = read_manifest(bundle)
    file = bundle / "engines" / "target" / "engines.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"{}")
    set_engines(bundle, "target", file)
    entry = load_bundle(bundle).manifest["engines"]["target"]
    assert entry == {
        "manifest": "engines/target/engines.json",
        "size": 2,
        "sha256": hashlib.sha256(b"{}").hexdigest(),
    }
    set_engines(bundle, "other", None)  # there are none
    assert list(read_manifest(bundle)["engines"]) == ["target"]
    set_engines(bundle, "target", None)
    assert read_manifest(bundle) == {**before, "engines": {}}
