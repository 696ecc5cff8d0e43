"""Files and directories appear whole or not at all; JSON that cannot be read is a ValueError, whatever is wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest
import xxhash

from via_sd.errors import DiskSpaceError
from via_sd.files import (
    JSON_BYTES,
    check_space,
    clear_leftovers,
    fast_hash,
    read_json,
    scratch_directory,
    whole_directory,
    write_json,
    write_whole,
)


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


def test_what_a_killed_run_left_is_removed_and_said(tmp_path):
    target = tmp_path / "target"
    for name in (".target.partial-123", ".other.partial-123"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    with pytest.warns(UserWarning, match=r"removed .*\.target\.partial-123, which an interrupted run left"):  # noqa: SIM117
        with whole_directory(target) as partial:
            (partial / "file").touch()
    assert names(tmp_path) == [".other.partial-123", "target"]


def test_what_a_killed_run_had_moved_away_is_put_back(tmp_path):
    target = tmp_path / "target"
    for name in (".target.partial-123", ".target.replaced-123"):
        (tmp_path / name).mkdir()
    (tmp_path / ".target.replaced-123" / "old").touch()
    with pytest.warns(UserWarning, match="an interrupted run"):
        clear_leftovers(target)
    assert names(tmp_path) == ["target"]
    assert names(target) == ["old"]


def test_what_a_killed_run_had_replaced_is_removed(tmp_path):
    target = tmp_path / "target"
    for folder in (target, tmp_path / ".target.replaced-123"):
        folder.mkdir()
        (folder / "file").touch()
    with pytest.warns(UserWarning, match=r"removed .*\.target\.replaced-123"):
        assert clear_leftovers(target) == []
    assert names(tmp_path) == ["target"]


def test_a_run_that_ends_while_it_replaces_a_directory_puts_it_back(tmp_path, monkeypatch):
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").touch()
    rename = Path.rename

    def interrupted(path, new):
        if ".partial-" in path.name:
            raise KeyboardInterrupt
        return rename(path, new)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), whole_directory(target, replace=True) as partial:
        (partial / "new").touch()
    assert names(tmp_path) == ["target"]
    assert names(target) == ["old"]


def test_a_run_does_not_begin_while_another_writes_its_target(tmp_path):
    target = tmp_path / "target"
    with whole_directory(target) as partial:
        (partial / "first").touch()
        with pytest.raises(FileExistsError, match="another run is writing it"), whole_directory(target):
            pytest.fail("two runs wrote one target")
    assert names(target) == ["first"]


def test_of_two_runs_to_one_target_the_later_says_that_it_lost(tmp_path):
    target = tmp_path / "target"

    def lose():
        with whole_directory(target) as partial:
            (partial / "mine").touch()
            clear_leftovers(target)  # as another run does when it begins
            assert names(partial) == ["mine"]
            target.mkdir()
            (target / "theirs").touch()

    with pytest.raises(FileExistsError, match="another run has written it in the meantime"):
        lose()
    assert names(tmp_path) == ["target"]
    assert names(target) == ["theirs"]


def test_a_file_that_cannot_be_written_whole_leaves_nothing(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="file"):
        write_whole(tmp_path / "file", "text")
    assert names(tmp_path) == ["file"]


def test_json_is_read_from_regular_files_of_some_size(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no regular file"):
        read_json(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no regular file"):
        read_json(Path("/dev/zero"))
    with (tmp_path / "large").open("wb") as file:
        file.truncate(JSON_BYTES + 1)
    with pytest.raises(ValueError, match=f"has {JSON_BYTES + 1} bytes, wanted at most {JSON_BYTES}"):
        read_json(tmp_path / "large")


SCRATCH = """
import os, signal, sys
from via_sd.files import scratch_directory
with scratch_directory("via-sd-test-") as scratch:
    (scratch / "file").touch()
    print(scratch, flush=True)
    if "--wait" in sys.argv:
        sys.stdin.read()
    else:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_scratch_directory_of_a_killed_run_is_removed_by_the_next_and_one_in_use_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", SCRATCH]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    killed = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    left = killed.stdout.strip()
    assert Path(left, "file").exists()
    with subprocess.Popen(
        [*command, "--wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        in_use = Path(other.stdout.readline().strip())
        with scratch_directory("via-sd-test-") as scratch:
            assert names(tmp_path) == sorted([in_use.name, scratch.name])
        assert names(tmp_path) == [in_use.name]
        _, said = other.communicate()
    assert f"removed {left}, which an interrupted run left" in said
    assert names(tmp_path) == []


def test_other_peoples_scratch_directories_and_links_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (tmp_path / "temporary" / "via-sd-test-link").symlink_to(tmp_path / "mine")
    (tmp_path / "temporary" / "via-sd-test-theirs").mkdir()
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    with scratch_directory("via-sd-test-"):
        pass
    assert names(tmp_path / "temporary") == ["via-sd-test-link", "via-sd-test-theirs"]
    assert names(tmp_path / "mine") == ["file"]


def test_too_little_room_on_a_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(2_000_000, 500_000, 1_500_000)
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda place: asked.append(Path(place)) or usage)
    check_space(tmp_path / "not" / "there", 1_500_000, "the weights")
    wanted = rf"disk of {tmp_path} has 1\.5 MB free, wanted 1\.6 MB for the weights; free some space, or choose another"
    with pytest.raises(DiskSpaceError, match=wanted):
        check_space(tmp_path / "not" / "there", 1_600_000, "the weights")
    assert asked == [tmp_path, tmp_path]
