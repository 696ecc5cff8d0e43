"""The repository's documents: their code blocks, and which of them the tests run.

A shell or Python block is run as it stands, unless its first line is `# not run by the tests: REASON`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from tests.support import ROOT

#: Languages whose blocks are run.
RUN = ("sh", "python")
#: Languages whose blocks show something: a layout, a file, a sum, what a command prints.
SHOWN = ("dockerfile", "json", "text", "yaml")
_NOT_RUN = re.compile(r"# not run by the tests: (?P<reason>\S.*)")


@dataclass(frozen=True)
class Block:
    """A fenced code block.

    Attributes:
        document: path of its document, from the root of the repository.
        line: number of its first line, as editors count.
        language: first word of the info string, "" if there is none.
    """

    document: str
    line: int
    language: str
    text: str

    @property
    def not_run_because(self) -> str | None:
        """The reason its first line gives; None if the block is to be run."""
        first = self.text.partition("\n")[0]
        found = _NOT_RUN.fullmatch(first)
        return found["reason"] if found else None

    @property
    def is_run(self) -> bool:
        """Whether a test has to run it."""
        return self.language in RUN and self.not_run_because is None

    @property
    def file(self) -> str:
        """Name that a Python block gives its script in its first line, for later blocks to use."""
        found = re.match(r"# (\w+\.py)\n", self.text)
        return found[1] if found else "block.py"

    @property
    def commands(self) -> list[str]:
        """The command lines of a shell block, continued lines joined, without comments."""
        joined = self.text.replace("\\\n", " ")
        lines = (re.sub(r"(^|\s)# .*", "", line).strip() for line in joined.splitlines())
        return [" ".join(line.split()) for line in lines if line]


def documents() -> list[str]:
    """Every document, by its path from the root."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str) -> list[Block]:
    """The fenced blocks of a document, in order."""
    return [
        Block(document, token.map[0] + 2, (token.info.split() or [""])[0], token.content)
        for token in MarkdownIt("commonmark").parse(read(document))
        if token.type == "fence" and token.map
    ]


def indented_blocks(document: str) -> list[int]:
    """Line numbers of code blocks that are indented, which have no language."""
    tokens = MarkdownIt("commonmark").parse(read(document))
    return [token.map[0] + 1 for token in tokens if token.type == "code_block" and token.map]


def table_rows(document: str, heading: str, index: int = 0) -> list[list[str]]:
    """Cells of a table under a heading, by default the first, without its header."""
    _, found, section = f"\n{read(document)}".partition(f"\n{heading}\n")
    assert found, f"{document} has no {heading!r}"
    tables = re.findall(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
    rows = tables[index].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("|"))] for row in rows]


def names_in(cell: str) -> list[str]:
    """What stands between backticks in a cell."""
    return re.findall(r"`([^`]+)`", cell)


def path_of(document: str) -> Path:
    return ROOT / document
