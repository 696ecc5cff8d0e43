"""`serve` starts the server over a repository, hands its flags on, and is replaced by it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

import pytest

from tests.support.command_line import invoke, refused
from tests.support.triton_client import eventually, post
from tests.support.tritonserver import free_ports
from tests.support.tritonserver_files import lay_out_backends, model_environment, server_files
from via_sd.export.triton import ServingOptions, write_repository

RUN = "from via_sd.tools.commands.main import run; run()"


@pytest.fixture
def repository(tiny_bundle: Path, tmp_path: Path) -> Path:
    write_repository(tiny_bundle, tmp_path / "models", options=ServingOptions(threads=1), copy=False)
    return tmp_path / "models"


def test_without_a_server_it_says_what_to_install(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    refused(invoke("serve", repository), "tritonserver is neither on the PATH nor at", "nvcr.io/nvidia/tritonserver")
    refused(invoke("serve", repository, "--server", repository), "is no program; --server wants the path")


def test_what_is_no_repository_or_given_twice_is_refused(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(invoke("serve", tmp_path / "empty"), "is no model repository: write one with via-sd-export triton BUNDLE")
    refused(invoke("serve", repository, "--", "--model-repository=x"), "is given already by REPOSITORY; leave it out")


PROGRAM = """#!{python}
import json, os, sys
print(json.dumps([os.getpid(), sys.argv[1:], os.environ["PATH"].split(os.pathsep)[0]]))
sys.exit(7)
"""


def test_the_server_takes_the_place_of_the_command_with_its_flags_and_this_python(
    repository: Path, tmp_path: Path
) -> None:
    program = tmp_path / "tritonserver"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    command = [sys.executable, "-c", RUN, "serve", str(repository), "--", "--http-port=1", "--log-verbose", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PATH": str(tmp_path)})
    said, _ = process.communicate()
    pid, arguments, first = json.loads(said)
    assert (pid, process.returncode) == (process.pid, 7)
    assert arguments == [f"--model-repository={repository.resolve()}", "--http-port=1", "--log-verbose", "1"]
    assert first == str(Path(sys.executable).parent)


@pytest.mark.server
def test_the_real_server_answers_and_ends_when_it_is_asked_to(repository: Path, tmp_path: Path) -> None:
    files, (http, grpc, metrics) = server_files(), free_ports(3)
    lay_out_backends(files, tmp_path / "backends")
    python = model_environment(tmp_path / "python") / "bin" / "python3"
    flags = [
        f"--backend-directory={tmp_path / 'backends'}", "--http-address=127.0.0.1", "--grpc-address=127.0.0.1",
        "--metrics-address=127.0.0.1", f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}",
    ]  # fmt: skip
    libraries = f"{files.libraries}:{sysconfig.get_config_var('LIBDIR')}"
    command = [str(python), "-c", RUN, "serve", str(repository), "--server", str(files.binary), "--", *flags]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log, env={**os.environ, "LD_LIBRARY_PATH": libraries})

    def ready() -> bool:
        assert process.poll() is None, (tmp_path / "log").read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{http}/v2/health/ready", timeout=5):
                return True
        except OSError:
            return False

    try:
        assert eventually(ready)
        status, body = post(f"127.0.0.1:{http}", "generate", {"text_input": "a", "max_tokens": 3})
        assert status == 200, body
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
