"""Programs of others that talk to Triton, from PyPI, each fetched once into the cache: the versions that were tried."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.support.tritonserver_files import TritonServerError, make_once, python_version, server_files
from via_sd.tools.demo.packaged_models import cache_directory

#: LangChain's connector, and what it needs: newer releases of these have what it imports no longer.
CONNECTOR = "langchain-nvidia-trt==0.0.1rc0"
CONNECTOR_NEEDS = ("langchain-core==0.2.43", "tritonclient[grpc]==2.51.0", "numpy==1.26.4")
#: The last wheels of Triton's client that carry `perf_analyzer`; the package of that name on PyPI is empty.
ANALYZER = "tritonclient==2.41.0"
ANALYZER_SHA256 = "cf4ed5df836fa99937678a9fd852f86ba05c7b83656dd0a540e20afdb9ab4629"


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TritonServerError(f"pip {' '.join(arguments)} failed; check the network:\n{done.stderr.strip()}")


def run_with_connector(script: str, *arguments: str, timeout: float) -> str:
    """What a Python script prints that may import `langchain_nvidia_trt`."""
    folder = cache_directory().resolve() / f"langchain-nvidia-trt-python{python_version()}"

    def fill(fresh: Path) -> None:
        _pip("install", f"--target={fresh}", "--only-binary=:all:", *CONNECTOR_NEEDS)
        _pip("install", f"--target={fresh}", "--no-deps", CONNECTOR)

    make_once(folder, fill)
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(folder)},
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_perf_analyzer(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run Triton's load generator; it takes the libraries that it lacks from the server's wheel."""
    folder = cache_directory().resolve() / "perf_analyzer-2.41.0"

    def fill(fresh: Path) -> None:
        platform = ("--platform", "manylinux1_x86_64", "--only-binary=:all:")
        _pip("download", "--no-deps", *platform, "--dest", str(fresh), ANALYZER)
        (wheel,) = fresh.glob("*.whl")
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != ANALYZER_SHA256:
            raise TritonServerError(f"{wheel.name} has sha256 {found}, not {ANALYZER_SHA256}")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/perf_analyzer"))
            (fresh / "perf_analyzer").write_bytes(archive.read(name))
        (fresh / "perf_analyzer").chmod(0o755)
        wheel.unlink()
        libraries = server_files().libraries
        for wanted, pattern in (("libb64.so.0d", "libb64-*"), ("libcudart.so.12", "libcudart-*")):
            (fresh / wanted).symlink_to(next(libraries.glob(pattern)))

    make_once(folder, fill)
    return subprocess.run(
        [str(folder / "perf_analyzer"), *arguments],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        timeout=timeout,
        check=False,
    )
