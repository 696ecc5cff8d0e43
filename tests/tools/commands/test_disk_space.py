"""A disk with too little room is one message before the long write begins, and nothing stays behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from via_sd.tools.commands.main import app

SCRIPT = Path(sys.executable).with_name("via-sd-export")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 600 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and os.geteuid() == 0
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)]
    if not mounted or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def arguments(command: str, bundle: Path, checkpoint: Path, place: Path) -> list[str]:
    return {
        "export": ["export", f"{checkpoint}", "--out", f"{place / 'bundle'}", "--no-check"],
        "export int4": ["export", f"{checkpoint}", "--out", f"{place / 'bundle'}", "--no-check", "--precision", "int4"],
        "triton": ["triton", f"{bundle}", "--repository", f"{place}"],
        "triton tiers": ["triton", f"{bundle}", "--repository", f"{place}", "--layout", "tiers"],
    }[command]


COMMANDS = ["export", "export int4", "triton", "triton tiers"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_asks_for_room_before_it_writes(command, tiny_bundle, tiny_checkpoint, tmp_path, monkeypatch):
    (tmp_path / "place").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    result = CliRunner().invoke(app, arguments(command, tiny_bundle, tiny_checkpoint, tmp_path / "place"))
    assert result.exit_code == 2, result.stderr
    (message,) = result.stderr.splitlines()
    assert message.startswith("error: the disk of")
    assert "has 0.1 MB free, wanted" in message
    assert "free some space, or choose another place" in message
    assert list((tmp_path / "place").iterdir()) == []


def test_an_engine_build_asks_for_room_before_it_writes(tiny_bundle, tmp_path, monkeypatch):
    pytest.importorskip("tensorrt_rtx", reason="needs the tensorrt-rtx extra")
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    before = sorted(bundle.rglob("*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    result = CliRunner().invoke(app, ["build", str(bundle), "--target", "tensorrt-rtx"])
    assert result.exit_code == 2, result.stderr
    assert "has 0.1 MB free, wanted" in result.stderr
    assert [path for path in sorted(bundle.rglob("*")) if path.name != "engines"] == before


def test_a_real_small_disk_refuses_a_bundle_and_a_search_graph(small_disk, tiny_bundle, tmp_path):
    commands = [
        ["triton", f"{tiny_bundle}", "--repository", f"{small_disk}"],
        ["search", f"{tiny_bundle}", "--out", f"{tmp_path / 'mask.json'}", "--text", __file__],
    ]
    for command in commands:
        environment = {**os.environ, "TMPDIR": str(small_disk)}
        done = subprocess.run([SCRIPT, *command], capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 2, done.stderr
        (message,) = done.stderr.splitlines()
        assert message.startswith(f"error: the disk of {small_disk}")
        assert list(small_disk.iterdir()) == []
