"""`chat` at a real terminal: history, prefix re-use, Ctrl-C, commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.command_line import SCRIPT, invoke, refused
from tests.support.terminal import Terminal


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


def test_a_token_at_a_terminal_has_the_colour_of_its_tier(tiny_bundle: Path) -> None:
    terminal = Terminal(
        str(SCRIPT), "chat", str(tiny_bundle), "--threads", "1", "--mode", "speculative", "--ignore-eos",
        "--max-new-tokens", "40", "--logit-bias", "65=100",
    )  # fmt: skip
    terminal.read_until(r"\n> $")
    terminal.press("bbbbbbbbbb\n")
    terminal.read_until(r"accepted.*\s+> $|b{40}\s+> $")
    green = re.findall(r"\x1b\[32m(b+)\x1b\[0m", terminal.printed)
    assert 20 < len("".join(green)) < 40, "drafted tokens are green, and full's own are not"
    terminal.press("\x04")
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
