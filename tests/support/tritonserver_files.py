"""The files of a real Triton Inference Server, and an environment that its models can run in, from PyPI alone.

The `nvidia-pytriton` wheel carries the `tritonserver` binary (HTTP, gRPC, metrics), the Python backend, and one stub
for each Python from 3.8 to 3.13. Only those files are used, not the wheel's Python API (which wants numpy < 2), so the
wheel is unpacked into a cache folder rather than installed. It has no ONNX Runtime or TensorRT backend.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from via_sd.errors import ViaSdError
from via_sd.files import whole_directory
from via_sd.tools.demo.packaged_models import cache_directory

WHEEL = "nvidia-pytriton"
WHEEL_VERSION = "0.7.0"
WHEEL_SHA256 = "21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df"
SERVER_VERSION = "2.51.0"
OLDER_NUMPY = "1.26.4"  # the last before 2


class TritonServerError(ViaSdError):
    """The server could not be fetched, started or stopped; the message says what to do."""


@dataclass(frozen=True)
class ServerFiles:
    """An unpacked server: the binary, the shared libraries beside it, and the folder that holds its backends."""

    binary: Path
    libraries: Path
    backends: Path
    stubs: Path


def server_files(cache: Path | None = None) -> ServerFiles:
    """The unpacked server, fetched with pip (55 MB) the first time.

    Raises:
        TritonServerError: pip could not fetch the wheel, or what it fetched is not the wheel that was tried.
    """
    root = (cache or cache_directory()).resolve() / f"tritonserver-{SERVER_VERSION}"
    make_once(root, _fetch_server)
    server = root / "pytriton" / "tritonserver"
    return ServerFiles(
        binary=server / "bin" / "tritonserver",
        libraries=root / "nvidia_pytriton.libs",
        backends=server / "backends",
        stubs=server / "python_backend_stubs",
    )


def _fetch_server(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        _unpack(_download(Path(scratch)), folder)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run([*command, f"{WHEEL}=={WHEEL_VERSION}"], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise TritonServerError(
            f"pip could not fetch {WHEEL}=={WHEEL_VERSION} (a Linux x86_64 wheel for glibc 2.35 or newer):\n"
            f"{done.stderr.strip()}\nCheck the network and this machine's package index, then run it again."
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise TritonServerError(
            f"{wheels[0].name} has sha256 {digest}, not {WHEEL_SHA256}: this is not the wheel that was tried. "
            "Check where the package index gets it from."
        )
    return wheels[0]


def _unpack(wheel: Path, root: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.filename.startswith(("pytriton/tritonserver/", "nvidia_pytriton.libs/")):
                path = Path(archive.extract(member, root))
                # zipfile drops the permission bits, and the server's programs need theirs.
                if mode := member.external_attr >> 16:
                    path.chmod(mode & 0o755)


def model_environment(scratch: Path, cache: Path | None = None) -> Path:
    """The prefix of the Python environment that models run in: this one, over numpy 1 where this one has numpy 2.

    This server's Python backend was built before numpy 2 and aborts on the first string it hands to a model that has
    numpy 2 loaded. Where that is what is installed here, a small environment is made at `scratch`: everything from this
    one behind a numpy 1 that is fetched into the cache the first time.

    Raises:
        TritonServerError: numpy 1 cannot be had for this Python.
    """
    if int(importlib.metadata.version("numpy").split(".")[0]) < 2:
        return Path(sys.prefix)
    older = (cache or cache_directory()).resolve() / f"numpy-{OLDER_NUMPY}-python{python_version()}"
    make_once(older, _fetch_numpy)
    venv.create(scratch, symlinks=True)
    packages = scratch / "lib" / f"python{python_version()}" / "site-packages"
    here = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    # addsitedir for this environment, not a bare path: it also reads the .pth files there, which is how editable
    # installs are found. The older numpy comes before it.
    lines = [str(older), *(f"import site; site.addsitedir({path!r})" for path in here)]
    (packages / "environment.pth").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return scratch


def _fetch_numpy(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [f"--target={folder}", f"numpy=={OLDER_NUMPY}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TritonServerError(
            f"this server's Python backend needs numpy < 2 (found {importlib.metadata.version('numpy')}), and pip has "
            f"none for Python {python_version()}:\n{done.stderr.strip()}\nRun this from Python 3.10, 3.11 or 3.12."
        )


def make_once(root: Path, fill: Callable[[Path], None]) -> None:
    """Make the folder `root` with what `fill` puts into it, unless it is there already."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(root.with_name(f".{root.name}.lock")):  # another process that makes it is waited for
        if not root.is_dir():
            with whole_directory(root) as fresh:
                fill(fresh)


def python_version() -> str:
    """Of the Python that runs this, such as 3.11."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def lay_out_backends(files: ServerFiles, folder: Path) -> None:
    """Lays out a backend directory in `folder`: the Python backend with the stub for this Python, all as links.

    The stub has to be a link: a copy would lose the library path that is written relative to where it lies.
    """
    version = python_version()
    stub = files.stubs / version / "triton_python_backend_stub"
    if not stub.is_file():
        have = ", ".join(sorted((entry.name for entry in files.stubs.iterdir()), key=lambda v: int(v.split(".")[1])))
        raise TritonServerError(
            f"this server has no Python backend stub for Python {version}, only for {have}: "
            "run it from an environment with one of those."
        )
    backend = folder / "python"
    backend.mkdir(parents=True)
    for entry in (files.backends / "python").iterdir():
        (backend / entry.name).symlink_to(entry)
    (backend / stub.name).symlink_to(stub)
