"""`chat` at a real terminal: history, prefix re-use, Ctrl-C, commands."""

from __future__ import annotations

import os
import pty
import re
import select
import time
from pathlib import Path

import pytest

from tests.support.command_line import SCRIPT, invoke, refused

PATIENCE = 60.0


class Terminal:
    """A program at a terminal of its own, whose keys are pressed and whose screen is read."""

    def __init__(self, *command: str) -> None:
        self._process, self._master = pty.fork()
        if self._process == 0:
            os.environ.update(TERM="xterm", COLUMNS="200")
            os.execv(command[0], command)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def read_until(self, pattern: str) -> str:
        """What the screen shows until `pattern`, without colours and the like."""
        seen, deadline = b"", time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode(errors="replace"))
            if re.search(pattern, text):
                return text
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    seen += os.read(self._master, 1)  # what follows the pattern is left for the next
                except OSError:
                    break
        raise AssertionError(f"{pattern!r} is not in {seen!r}")

    def exit_code(self) -> int:
        _, status = os.waitpid(self._process, 0)
        os.close(self._master)
        return os.waitstatus_to_exitcode(status)


def test_a_conversation_at_a_terminal(tiny_bundle: Path) -> None:
    terminal = Terminal(
        str(SCRIPT), "chat", str(tiny_bundle), "--threads", "1", "--mode", "plain", "--ignore-eos",
        "--max-new-tokens", "120", "--logit-bias", "65=100", "--system", "abc",
    )  # fmt: skip
    terminal.read_until(r"\n> $")
    terminal.press("hello\n")
    terminal.read_until(r"b{3,}")  # the answer has begun
    terminal.press("\x03")
    terminal.read_until(r"\n> $")
    terminal.press("/stats\n")
    first = terminal.read_until(r"positions used\s+> $")
    assert "cancelled" in first
    assert re.search(r"prompt of (\d+) tokens, 0 of them", first)
    terminal.press("again\n")
    terminal.read_until(r"b{120}\s+> $")
    terminal.press("/stats\n")
    second = terminal.read_until(r"positions used\s+> $")
    reused = re.search(r"tokens, (\d+) of them in the KV buffers already", second)
    assert reused is not None
    assert int(reused[1]) > 20, "the second turn is read on top of the first"
    terminal.press("half a line\x03")
    terminal.read_until(r"\n> $")
    terminal.press("/nonsense\n")
    terminal.read_until("no command is called /nonsense; /help lists them")
    terminal.press("x" * 200 + "\n")
    terminal.read_until("/reset forgets the conversation")
    terminal.press("/reset\n/quit\n")
    assert terminal.exit_code() == 0


@pytest.mark.parametrize("ends", ["/quit\n", ""])
def test_chat_reads_lines_from_a_pipe_too(ends: str, tiny_bundle: Path) -> None:
    pytest.importorskip("llguidance", reason="needs the grammar extra")
    arguments = ("chat", tiny_bundle, "--max-new-tokens", 5, "--threads", 1, "--choice", "yes")
    done = invoke(*arguments, stdin=f"/help\n/stats\nhello\n\n/stats\n{ends}")
    assert done.exit_code == 0
    assert "yes" in done.stdout
    assert "nothing was answered yet" in done.stderr
    assert "Ctrl-C ends an answer" in done.stderr


def test_chat_without_a_template_is_refused(tiny_bundle: Path) -> None:
    refused(invoke("chat", tiny_bundle, "--raw"), "--raw leaves the chat template out")
