"""Files and directories appear whole or not at all; JSON that cannot be read is a ValueError, whatever is wrong."""

from __future__ import annotations

import json

import pytest
import xxhash

from via_sd.files import fast_hash, read_json, whole_directory, write_json


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def test_a_directory_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "above" / "target"
    with whole_directory(target) as partial:
        (partial / "file").write_text("content")
        assert not target.exists()
    assert names(tmp_path / "above") == ["target"]
    assert names(target) == ["file"]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError, OSError])
def test_a_directory_that_fails_leaves_what_was_there(failure, replace, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").touch()

    def fail():
        with whole_directory(target, replace=replace) as partial:
            (partial / "new").touch()
            raise failure

    with pytest.raises(failure):
        fail()
    assert names(tmp_path) == ["target"]
    assert names(target) == ["old"]


def test_a_directory_is_replaced_when_that_was_asked_for(tmp_path):
    target = tmp_path / "target"
    for name in ("old", "new"):
        with whole_directory(target, replace=True) as partial:
            (partial / name).touch()
    assert names(tmp_path) == ["target"]
    assert names(target) == ["new"]
    with pytest.raises(OSError, match="target"), whole_directory(target) as partial:
        (partial / "newer").touch()
    assert names(tmp_path) == ["target"]
    assert names(target) == ["new"]


def test_json_is_read_as_it_was_written(tmp_path):
    data = {"text": "Größe", "numbers": [1, 2.5, None, True]}
    write_json(tmp_path / "file.json", data)
    assert read_json(tmp_path / "file.json") == data
    assert names(tmp_path) == ["file.json"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe{}", b"[" * 100_000, b'{"a":' * 100_000], ids=["none", "cut", "utf16", "[", "{"]
)
def test_what_is_not_json_is_a_value_error(content, tmp_path):
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(ValueError):  # noqa: PT011 - what it says differs
        read_json(tmp_path / "file.json")
    with pytest.raises(OSError, match="nowhere"):
        read_json(tmp_path / "nowhere.json")


@pytest.mark.parametrize("size", [0, 1, (1 << 22) - 1, 1 << 22, (1 << 22) + 1])
def test_a_hash_covers_every_byte(size, tmp_path):
    content = json.dumps({"size": size}).encode() * (1 + size // 8)
    (tmp_path / "file").write_bytes(content[:size])
    assert fast_hash(tmp_path / "file") == xxhash.xxh3_64_hexdigest(content[:size])
