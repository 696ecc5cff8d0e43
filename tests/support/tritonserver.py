"""A real Triton Inference Server without a container or a GPU: start it on loopback ports, stop it.

    python -m tests.support.tritonserver REPOSITORY [-- FLAGS]      # serve in the foreground until Ctrl-C

or, in a program, `with TritonServer(repository) as server: ... server.http_url ...`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer

from tests.support.tritonserver_files import (
    ServerFiles,
    TritonServerError,
    lay_out_backends,
    model_environment,
    server_files,
)
from via_sd.tools.commands.console import command, err

_SHM = Path("/dev/shm")
_PR_SET_PDEATHSIG = 1
_run_number = itertools.count()


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody has now."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _end_with_parent() -> None:
    """Run in the server's process before it begins: a parent that is killed could not stop it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _errors(log: str) -> str:
    """The lines of a server's log that say what went wrong, else its end."""
    lines = log.splitlines()
    told = [
        line for line in lines if line.startswith(("E", "error:")) and "NVML" not in line and "CudaDriver" not in line
    ]
    return "\n".join(told or lines[-40:])


class TritonServer:
    """One server process over one model repository, on loopback only; a context manager.

    Models run in the environment that started this (see `model_environment`): what is importable here is importable
    there. The server ends with the thread that started it.

    Args:
        repository: the model repository.
        explicit: start with no model and load by request (`--model-control-mode explicit`).
        load: models to load at the start when `explicit`.
        ports: HTTP, gRPC and metrics port; three free ones when not given.
        metrics: keep figures and serve them.
        arguments: further `tritonserver` arguments.
        log: a file for its log, which is kept; None: one that goes with the server.
        cache: where the server is unpacked.
    """

    def __init__(
        self,
        repository: Path,
        *,
        explicit: bool = False,
        load: Sequence[str] = (),
        ports: tuple[int, int, int] | None = None,
        metrics: bool = True,
        arguments: Sequence[str] = (),
        log: Path | None = None,
        cache: Path | None = None,
    ) -> None:
        self._log = log
        self._repository = repository
        self._fixed_ports = ports
        self._arguments = list(arguments)
        if explicit:
            self._arguments += ["--model-control-mode=explicit", *(f"--load-model={name}" for name in load)]
        self._metrics = metrics
        if not metrics:
            self._arguments.append("--allow-metrics=false")
        self._cache = cache
        self._prefix = f"via_sd_{os.getpid()}_{next(_run_number)}_"
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None
        self._last_log = ""
        self.http_port, self.grpc_port, self.metrics_port = 0, 0, 0

    @property
    def http_url(self) -> str:
        """`host:port` of the HTTP endpoint, as `tritonclient.http` wants it."""
        return f"127.0.0.1:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """`host:port` of the gRPC endpoint, as `tritonclient.grpc` wants it."""
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """The full address of the Prometheus metrics page."""
        return f"http://127.0.0.1:{self.metrics_port}/metrics"

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        if self._process is None:
            raise TritonServerError("the server is not running: call start() first")
        return self._process.pid

    @property
    def log(self) -> str:
        """What the server and its models have printed since the last start."""
        if self._scratch is None:
            return self._last_log
        return (self._log or self._scratch / "log").read_text(errors="replace")

    def start(self, timeout: float = 60.0) -> None:
        """Starts the server and waits until it reports that it is ready.

        Raises:
            TritonServerError: it is running already, exited (a model failed to load, a port was taken), or was not
                ready within `timeout` seconds; the message holds the end of its log.
        """
        if self._process is not None:
            raise TritonServerError(f"the server is already running as process {self._process.pid}: stop it first")
        files = server_files(self._cache)
        # Between the search for free ports and the server's bind another process may take one: only that is retried.
        for attempt in range(3):
            process = self._process = self._launch(files)
            if self._wait_until_ready(process, time.monotonic() + timeout):
                return
            status, log = process.poll(), self.log
            self.stop()
            if self._fixed_ports is None and "already in use" in log and attempt < 2:
                continue
            what = f"was not ready after {timeout:.0f} s" if status is None else f"exited with status {status}"
            raise TritonServerError(f"the server {what}. From its log:\n{_errors(log)}")

    def _launch(self, files: ServerFiles) -> subprocess.Popen[bytes]:
        self._scratch = Path(tempfile.mkdtemp(prefix="tritonserver-run-"))
        lay_out_backends(files, self._scratch / "backends")
        self.http_port, self.grpc_port, self.metrics_port = self._fixed_ports or free_ports(3)
        command = [
            str(files.binary),
            f"--id={self._prefix}",
            f"--model-repository={self._repository}",
            f"--backend-directory={self._scratch / 'backends'}",
            "--http-address=127.0.0.1",
            f"--http-port={self.http_port}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={self.grpc_port}",
            "--metrics-address=127.0.0.1",
            f"--metrics-port={self.metrics_port}",
            # A prefix of its own makes what an unclean exit leaves in shared memory ours to find and remove.
            f"--backend-config=python,shm-region-prefix-name={self._prefix}",
            *self._arguments,
        ]
        python = model_environment(self._scratch / "python", self._cache)
        libraries = [str(files.libraries), sysconfig.get_config_var("LIBDIR") or ""]
        environment = dict(os.environ)
        environment["LD_LIBRARY_PATH"] = ":".join(folder for folder in libraries if folder)
        # The backend takes the first `python3` on PATH for its interpreter; PYTHONPATH does not reach it.
        environment["PATH"] = f"{python / 'bin'}:{environment.get('PATH', '')}"
        with open(self._log or self._scratch / "log", "wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def _wait_until_ready(self, process: subprocess.Popen[bytes], deadline: float) -> bool:
        while time.monotonic() < deadline and process.poll() is None:
            if self.ready():
                return True
            time.sleep(0.05)
        return False

    def ready(self) -> bool:
        """Whether the server and all of its models answer that they are ready."""
        try:
            # Another server may have had the port first, and would answer in this one's place.
            with urllib.request.urlopen(f"http://{self.http_url}/v2", timeout=5) as answer:
                if json.load(answer)["name"] != self._prefix:
                    return False
            # The metrics page comes up last.
            pages = [f"http://{self.http_url}/v2/health/ready", *([self.metrics_url] if self._metrics else [])]
            for page in pages:
                with urllib.request.urlopen(page, timeout=5):
                    pass
            return True
        except (OSError, ValueError):
            return False

    def wait(self) -> int:
        """Blocks until the server exits by itself; its exit status."""
        if self._process is None:
            raise TritonServerError("the server is not running: call start() first")
        return self._process.wait()

    def kill(self) -> None:
        """Ends the server and its models at once, as a crash would, and clears what that leaves in shared memory."""
        self._end(signal.SIGKILL, timeout=10.0)

    def stop(self, timeout: float = 30.0) -> None:
        """Lets the server finish what it is doing and exit; after `timeout` seconds it is killed."""
        self._end(signal.SIGTERM, timeout)

    def _end(self, how: signal.Signals, timeout: float) -> None:
        process, self._process = self._process, None
        if process is not None:
            try:
                if how == signal.SIGTERM:
                    process.terminate()
                    process.wait(timeout)
            except subprocess.TimeoutExpired:
                pass
            finally:
                # The stubs are in the server's process group: none of them may outlive it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout)
        for region in _SHM.glob(f"{self._prefix}*"):
            region.unlink(missing_ok=True)
        if self._scratch is not None:
            self._last_log = self.log
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def __enter__(self) -> TritonServer:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@command
def main(
    repository: Annotated[Path, typer.Argument(help="Model repository.")],
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[-- FLAGS]", help="Further flags for tritonserver, behind `--`.")
    ] = None,
    log: Annotated[Path, typer.Option(help="File for the server's log.")] = Path("tritonserver.log"),
    http_port: Annotated[int, typer.Option(help="Port of the HTTP endpoint.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="Port of the gRPC endpoint.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Port of the metrics page.")] = 8002,
) -> None:
    """Serve REPOSITORY on 127.0.0.1 until Ctrl-C, with the Python environment that runs this."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    # However this is asked to end, it ends the server too.
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    with (
        contextlib.suppress(KeyboardInterrupt),
        TritonServer(
            repository, ports=(http_port, grpc_port, metrics_port), arguments=flags or (), log=log.absolute()
        ) as server,
    ):
        err.print(
            f"ready: http://{server.http_url} grpc://{server.grpc_url} {server.metrics_url}, log: {log}",
            highlight=False,
            soft_wrap=True,
        )
        server.wait()
        raise TritonServerError(f"the server ended by itself. From its log:\n{_errors(server.log)}")


if __name__ == "__main__":
    typer.run(main)
