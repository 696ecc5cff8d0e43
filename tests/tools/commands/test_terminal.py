"""At the terminal names and texts are text, what its encoding lacks is escaped, and a signal leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from rich.table import Table

from tests.support.command_line import SCRIPT, invoke
from via_sd.tools.commands.console import command, err, print_json, printable

HOSTILE = "a[/b] [red]\x1b[2J\x9b31m\x07 é"


def test_control_characters_are_written_out():
    assert printable(HOSTILE) == "a[/b] [red]\\x1b[2J\\x9b31m\\x07 é"
    assert printable("line\n\ttab") == "line\n\ttab"


def test_names_are_no_markup_and_steer_no_terminal(capsys):
    table = Table(show_header=False)
    table.add_row(HOSTILE)
    err.print(HOSTILE)
    err.print(table)
    shown = capsys.readouterr().err
    assert shown.count("a[/b] [red]\\x1b[2J") == 2
    assert "\x1b" not in shown


def test_an_error_shows_a_hostile_name_as_text(tmp_path):
    result = invoke("generate", tmp_path / HOSTILE, "--prompt", "x")
    assert result.exit_code == 2
    assert "a[/b] [red]\\x1b[2J" in result.stderr
    assert "\x1b" not in result.stderr


def test_json_is_whole_in_an_encoding_without_its_characters(monkeypatch, tmp_path):
    file = tmp_path / "out"
    with file.open("w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        print_json({"text": "é 😀"}, ensure_ascii=False)
    assert json.loads(file.read_text(encoding="ascii")) == {"text": "é 😀"}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_an_encoding_without_the_characters_of_a_message_gets_them_escaped(encoding, tmp_path):
    done = subprocess.run(
        [SCRIPT, "inspect", str(tmp_path / "😀")],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"},
    )
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert ("😀" if encoding == "utf-8" else "\\U0001f600") in done.stderr.decode(encoding)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_command_in_order(name, capsys, request):
    left = []

    @command
    def work():
        try:
            os.kill(os.getpid(), getattr(signal, name))
            signal.sigtimedwait([], 5)
        finally:
            left.append("cleaned up")

    # A run of the tests in the background may have been born to ignore it.
    inherited = signal.signal(getattr(signal, name), signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(getattr(signal, name), inherited))
    before = signal.getsignal(getattr(signal, name))
    with pytest.raises(BaseException, match=str(128 + getattr(signal, name))):
        work()
    assert left == ["cleaned up"]
    assert f"error: ended by {name}" in capsys.readouterr().err
    assert signal.getsignal(getattr(signal, name)) is before


def test_too_little_memory_is_one_message(capsys):
    @command
    def work():
        raise MemoryError("Unable to allocate 8 EiB")

    with pytest.raises(BaseException, match="2"):
        work()
    assert "error: there is not enough memory for this (Unable to allocate 8 EiB)" in capsys.readouterr().err
