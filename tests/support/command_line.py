"""The commands as scripts and people run them: in this process, or as the installed console script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner, Result

from via_sd.tools.commands.main import app

SCRIPT = Path(sys.executable).with_name("via-sd-export")


def invoke(*arguments: object, stdin: str | None = None) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def run_script(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the installed console script, as a user does; line ends stay as they were printed."""
    done = subprocess.run(
        [str(SCRIPT), *map(str, arguments)], capture_output=True, check=False, env={**os.environ, **environment}
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def refused(result: Result | subprocess.CompletedProcess[str], *says: str) -> str:
    """Assert that a command ended with one message on stderr and exit code 2; the message."""
    code = result.exit_code if isinstance(result, Result) else result.returncode
    assert code == 2, (result.stdout, result.stderr)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert "Traceback" not in result.stderr
    for text in says:
        assert text in lines[0]
    return lines[0]


def heed_interrupts() -> None:
    """Run in a new process: who starts these tests in the background has it ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
