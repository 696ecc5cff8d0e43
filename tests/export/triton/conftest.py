"""The bundle that repositories are written from."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def bundle(tiny_bundle: Path) -> Path:
    """A bundle with a slim-verifier."""
    return tiny_bundle
