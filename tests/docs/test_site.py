"""The site builds without a warning, needs nothing from elsewhere, and its references leave nothing out."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tests.support import ROOT
from via_sd.tools.commands.main import app

#: Packages whose public names people use.
PACKAGES = (
    "via_sd",
    "via_sd.runtime",
    "via_sd.export",
    "via_sd.masks",
    "via_sd.tools.search",
    "via_sd.tools.calibration",
    "via_sd.tools.bench",
    "via_sd.tools.validation",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; every warning is an error, broken links and anchors among them."""
    for module in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(module, reason="needs the docs extra")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "docs", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_pages_load_nothing_from_elsewhere(site):
    """Scripts, styles, fonts and pictures lie in the site; only links lead out of it."""
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        loaded = re.findall(r'<(?:script|link|img|source)\b[^>]*?(?:src|href)="([^"]+)"', page.read_text())
        assert loaded
        assert [url for url in loaded if re.match(r"(https?:)?//", url)] == [], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//", style.read_text()), style.name


def test_what_the_code_cites_has_a_place(site):
    for page, anchor in (("architecture", "cache-table"), ("statistics", "divergence"), ("bundle", "graphs")):
        assert f'id="{anchor}"' in (site / f"{page}.html").read_text()


def test_the_python_reference_has_every_public_name(site):
    reference = (site / "reference/python.html").read_text()
    described = {name.rpartition(".")[2] for name in re.findall(r'<dt class="sig[^>]*id="([\w.]+)"', reference)}
    for package in PACKAGES:
        public = set(importlib.import_module(package).__all__) - {"__version__"}
        assert public - described == set(), package


def test_the_command_reference_has_every_command_and_option(site):
    reference = (site / "reference/commands.html").read_text()
    commands = typer.main.get_command(app)
    assert len(commands.commands) > 8
    for name, command in commands.commands.items():
        assert f"via-sd-export {name}" in re.sub(r"<[^>]+>", "", reference)
        for parameter in command.params:
            for option in parameter.opts:
                assert not option.startswith("--") or option in reference, f"{name} {option}"
