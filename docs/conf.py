"""The documentation site: `make docs` builds it with Sphinx, every warning an error, without the network.

Pages are Markdown that a code host shows as well; what only Sphinx understands is kept to pages that exist for the site
alone (the start page, the two references, the examples).
"""

from __future__ import annotations

import html
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


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_directive("command-reference", CommandReference)
    app.connect("autodoc-process-docstring", no_type_before_a_colon, priority=400)  # napoleon's is 500
