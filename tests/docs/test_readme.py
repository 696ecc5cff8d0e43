"""The README is short, opens with what the project is and two commands, and its tables say what the code has."""

from __future__ import annotations

from importlib.metadata import metadata

from tests.support import ROOT
from tests.support.documents import blocks, names_in, read, table_rows
from via_sd.runtime import EXACT_MODES, MODES

README = "README.md"


def test_it_has_at_most_900_words():
    assert len(read(README).split()) <= 900


def test_it_opens_with_what_it_is_and_the_two_commands():
    first_screen = read(README).split("\n## ")[0]
    assert first_screen.startswith("# via-sd-export\n\n`via-sd-export` turns ")
    assert [line.split("#")[0].strip() for line in blocks(README)[0].text.splitlines()] == ["make demo", "make test"]
    assert "](docs/images/tiers.svg)" in first_screen
    assert (ROOT / "docs/images/tiers.svg").is_file()


def test_the_table_of_extras_lists_them_all():
    listed = {name for row in table_rows(README, "## Install") for name in names_in(row[0])}
    assert listed == set(metadata("via-sd-export").get_all("Provides-Extra") or [])


def test_the_table_of_modes_promises_what_the_code_does():
    promises = {name: row[2] for row in table_rows(README, "## What the modes promise") for name in names_in(row[0])}
    assert set(promises) == {*MODES, "auto"}
    assert {mode for mode in MODES if "**approximate**" in promises[mode]} == set(MODES) - EXACT_MODES


def test_every_page_of_the_documentation_can_be_reached_from_it():
    for page in sorted((ROOT / "docs").glob("*.md")):
        if page.name not in ("index.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"):  # of the site alone
            assert f"](docs/{page.name}" in read(README), page.name
