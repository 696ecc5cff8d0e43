"""The documentation site: `make docs` builds it with Sphinx, every warning an error, without the network.

Pages are Markdown that a code host shows as well; what only Sphinx understands is kept to pages that exist for the site
alone (the start page, the two references, the examples).
"""

from __future__ import annotations

import html
import importlib
import re
import subprocess
import sys
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING, Any

from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

project = "via-sd-export"
release = installed_version(project)
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["kubernetes"]

html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 4  # links to headings, named as code hosts name them

add_module_names = False
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
default_role = "code"  # single backticks in docstrings
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88


#: Packages whose public names are documented in reference/python.md.
PACKAGES = (
    "via_sd.masks",
    *(f"via_sd.tools.{name}" for name in ("search", "calibration", "bench", "prediction", "validation")),
)


class CommandReference(SphinxDirective):
    """`{command-reference}`: every command of the command line with its options, as typer writes them."""

    def run(self) -> list[nodes.Node]:
        typer = [sys.executable, "-m", "typer", "via_sd.tools.commands.main", "utils", "docs", "--name", project]
        written = subprocess.run(typer, check=True, capture_output=True, text=True).stdout
        _, _, commands = html.unescape(written).partition("\n## ")
        return self.parse_text_to_nodes("## " + commands, allow_section_headings=True)


def no_type_before_a_colon(_app: Sphinx, what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Keep napoleon from taking what comes before a colon in the first sentence for a type."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # an empty comment, which has no colon


def code_in_modules(_app: Sphinx, what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Show the indented paragraphs of a module's docstring as the code they are."""
    if what == "module":
        for at in range(len(lines) - 1, 0, -1):
            if lines[at].startswith("    ") and not lines[at - 1].strip():
                lines[at:at] = ["::", ""]


def one_name_a_field(_app: Sphinx, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Give each of several names that share a description a field of its own: napoleon takes one."""
    for at in range(len(lines) - 1, -1, -1):
        if found := re.fullmatch(r"( +)(\w+(?:, \w+)+)(:.*)", lines[at]):
            indent, names, text = found.groups()
            end = at + 1
            while end < len(lines) and lines[end].startswith(indent + " "):
                end += 1
            lines[at:end] = [
                line for name in names.split(", ") for line in (indent + name + text, *lines[at + 1 : end])
            ]


def resolve_lazy_names() -> None:
    """Import what packages import on first use: autodoc documents what is there."""
    for name in PACKAGES:
        package = importlib.import_module(name)
        for public in package.__all__:
            setattr(package, public, getattr(package, public))


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    resolve_lazy_names()
    app.add_directive("command-reference", CommandReference)
    app.connect("autodoc-process-docstring", code_in_modules, priority=400)
    app.connect("autodoc-process-docstring", one_name_a_field, priority=400)
    app.connect("autodoc-process-docstring", no_type_before_a_colon, priority=400)  # napoleon's is 500
