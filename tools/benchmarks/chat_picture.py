"""Draws a conversation with `via-sd-export chat` as it is at a terminal: docs/images/chat.svg.

    python -m tools.benchmarks.chat_picture BUNDLE OUT

The program runs at a real terminal; what it prints there becomes the picture.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Annotated

import typer
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from tests.support.command_line import SCRIPT
from tests.support.terminal import Terminal
from via_sd.tools.commands.console import command

#: What is typed, after each answer.
LINES = (
    "Write a Python function that returns the mean of a list.",
    "Now with type hints.",
    "/stats",
    "/quit",
)
COLUMNS = 100
_PROMPT = r"(^|\n)> $"
#: Fonts that a page would fetch from elsewhere.
_FONTS = re.compile(r"@font-face \{\{.*?\}\}", re.DOTALL)


def converse(bundle: Path, options: list[str]) -> str:
    """What a terminal gets to show: a conversation of `LINES`, its colours included."""
    terminal = Terminal(str(SCRIPT), "chat", str(bundle), *options, columns=COLUMNS)
    for line in LINES:
        terminal.read_until(_PROMPT)
        terminal.press(f"{line}\n")
    terminal.read_until(re.escape(LINES[-1]))
    terminal.exit_code()
    return terminal.printed


@command
def main(
    bundle: Annotated[Path, typer.Argument(help="Bundle to talk to.", metavar="<path>")],
    out: Annotated[Path, typer.Argument(help="The picture, SVG.", metavar="<path>")],
    mode: Annotated[str, typer.Option(help="Decoding mode.", metavar="<str>")] = "cascade",
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.", metavar="<int>")] = 120,
) -> None:
    """Draw a conversation with BUNDLE at a terminal."""
    shown = converse(bundle, ["--mode", mode, "--max-new-tokens", str(max_new_tokens), "--system", "Be brief."])
    # No cursor is moved but by line editing, which ends as the line stands.
    lines = re.sub(r"\x1b\[\?2004[hl]|\r", "", shown)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(lines))
    picture = console.export_svg(
        title=f"via-sd-export chat {bundle.name}",
        theme=MONOKAI,
        code_format=_FONTS.sub("", CONSOLE_SVG_FORMAT),
        unique_id="chat",
    )
    out.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
