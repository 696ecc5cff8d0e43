"""What documents tell a reader to type works as it stands, in the order in which it is read."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from importlib.metadata import metadata
from pathlib import Path

import pytest
import typer
import yaml

from tests.support import ROOT
from tests.support.documents import RUN, SHOWN, Block, blocks, documents, indented_blocks, read
from tests.support.tritonserver import TritonServer
from via_sd.tools.commands.main import app

#: What a document finds (a fixture), where it begins with less than the others do: they have a bundle at hand.
BEGIN_WITH = {"README.md": "clone_with_mask", "docs/tutorial.md": "clone"}
#: Documents that need more than the other tests do, and it.
NEED = {"docs/tensorrt.md": "tensorrt_rtx"}
#: The command that starts the server until it is stopped. The tests start the same server, on ports that are free.
SERVE = "python -m tests.support.tritonserver "


#: Commands whose result is files.
QUIET = ("export", "search", "triton")


def run_by_the_tests(document: str) -> list[Block]:
    """Blocks to run, but for those that tests of their own hold: targets of the Makefile, extras to install."""
    return [
        block
        for block in blocks(document)
        if block.is_run and not (block.language == "sh" and all(map(_held_elsewhere, block.commands)))
    ]


def _held_elsewhere(line: str) -> bool:
    return line.startswith(("make ", "pip install "))


def serves(document: str) -> bool:
    """Whether the document starts a Triton server."""
    return any(line.startswith(SERVE) for block in run_by_the_tests(document) for line in block.commands)


def read_documents() -> Iterator[object]:
    """Documents with blocks to run, those with a server marked so."""
    for document in documents():
        if run_by_the_tests(document):
            yield pytest.param(document, marks=pytest.mark.server if serves(document) else ())


def run(command: list[str], block: Block, folder: Path, environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    where = f"{block.document}, line {block.line}:\n{block.text}"
    assert done.returncode == 0, f"{where}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, f"{where}\n{done.stderr}"
    verbs = [line.split()[1] for line in block.commands if line.startswith("via-sd-export ")]
    assert done.stdout.strip() or set(verbs) <= set(QUIET), f"{where}\nprinted nothing"


@pytest.mark.parametrize("document", list(read_documents()))
def test_the_blocks_of_a_document_run_in_the_order_a_reader_meets_them(document, environment, request):
    if document in NEED and importlib.util.find_spec(NEED[document]) is None:
        pytest.skip(f"needs {NEED[document]}")
    folder = request.getfixturevalue(BEGIN_WITH.get(document, "clone_with_bundle"))
    with ExitStack() as servers:
        ports: dict[str, str] = {}
        for block in run_by_the_tests(document):
            if block.language == "python":
                script = folder / block.file
                script.write_text(_at(ports, block.text))
                run([sys.executable, script.name], block, folder, environment)
            elif block.commands[0].startswith(SERVE):
                assert len(block.commands) == 1, "a server is started in a block of its own"
                repository = folder / block.commands[0].removeprefix(SERVE)
                server = servers.enter_context(TritonServer(repository))
                ports = {"localhost:8000": server.http_url, "localhost:8001": server.grpc_url}
                ports["localhost:8002"] = f"127.0.0.1:{server.metrics_port}"
            else:
                run(["bash", "-euo", "pipefail", "-c", _at(ports, block.text)], block, folder, environment)


def _at(ports: Mapping[str, str], text: str) -> str:
    """`text` with the ports on which the server listens here."""
    for documented, actual in ports.items():
        text = text.replace(documented, actual)
    return text


def test_every_command_of_the_command_line_is_shown_and_run():
    ran = {
        line.split()[1]
        for document in documents()
        for block in run_by_the_tests(document)
        for line in block.commands
        if line.startswith("via-sd-export ")
    }
    shown = {line.split()[1] for line in every_command() if line.startswith("via-sd-export ")}
    known = set(typer.main.get_command(app).commands)
    assert shown == known
    assert ran == known - {"demo", "serve"}  # they need a download, and an installed server


def every_command() -> list[str]:
    """The command lines of every shell block, run or not."""
    return [line for each in documents() for b in blocks(each) if b.language == "sh" for line in b.commands]


@pytest.mark.parametrize("document", documents())
def test_every_block_is_run_or_says_that_it_is_not(document):
    """A block has a language, and one that could be run is; nothing to type hides in one that is only shown."""
    assert indented_blocks(document) == []
    for block in blocks(document):
        if block.language.startswith("{"):  # a directive of the site
            continue
        assert block.language in (*RUN, *SHOWN), f"{document}, line {block.line}: language {block.language!r}"
        if block.language == "text":
            first_words = {line.split(" ")[0] for line in block.text.splitlines()}
            hidden = first_words & {"$", "via-sd-export", "python", "pip", "make", "curl", "docker", "kubectl"}
            assert not hidden, f"{document}, line {block.line}: commands in a block that is not run"


def test_files_that_are_shown_are_of_their_language():
    for document in documents():
        for block in blocks(document):
            if block.language == "json":
                json.loads(block.text)
            elif block.language == "yaml":
                assert yaml.safe_load(block.text)


def program(module: str) -> str:
    """Source of what `python -m MODULE` runs."""
    spec = importlib.util.find_spec(module)
    assert spec, module
    if spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{module}.__main__")
    assert spec, module
    assert spec.origin
    return Path(spec.origin).read_text(encoding="utf-8")


def test_commands_that_are_not_run_have_options_that_exist():
    commands = typer.main.get_command(app).commands
    for line in every_command():
        words = shlex.split(line)
        own = words[: words.index("--")] if "--" in words else words  # what follows is another program's
        given = {word.partition("=")[0] for word in own if word.startswith("--")}
        if words[0] == "via-sd-export":
            parameters = commands[words[1]].params
            known = {name for each in parameters for name in (*each.opts, *each.secondary_opts)}
            assert given <= known, line
        elif found := re.match(r"python -m (tools\.benchmarks\.\w+)", line):
            source = program(found[1])
            for option in given:
                assert re.search(rf"\b{option[2:].replace('-', '_')}: ", source), line


def test_the_make_targets_exist():
    asked = {target for line in every_command() if line.startswith("make ") for target in shlex.split(line)[1:]}
    known = re.findall(r"^([a-z][a-z-]*(?: [a-z-]+)*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    targets = {target for target in asked if "=" not in target}
    assert targets >= {"demo", "test", "docs"}
    assert targets <= {name for entry in known for name in entry.split()}


def test_the_extras_to_install_exist():
    known = set(metadata("via-sd-export").get_all("Provides-Extra") or [])
    asked = [
        extra
        for line in every_command()
        for listed in re.findall(r"pip install '(?:\.|via-sd-export)\[([a-z,-]+)\]'", line)
        for extra in listed.split(",")
    ]
    assert "cpu" in asked
    assert set(asked) <= known


def test_the_modules_to_run_exist():
    named = {
        module
        for each in documents()
        for module in re.findall(r"python -m ((?:tools|tests|via_sd)(?:\.[a-z_0-9]+)+)(?![\w.])", read(each))
    }
    assert "tools.benchmarks.memory" in named
    for module in named:
        assert "__main__" in program(module), f"{module} is no program"
