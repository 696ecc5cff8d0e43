"""The tiny models of the tests, where the commands of this package look for them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tiny_checkpoint, tiny_bundle, tiny_masks, tmp_path_factory) -> Path:
    """A folder with a checkpoint, its bundle, masks and a GGUF file."""
    from tests.support.gguf_files import write_gguf

    root = tmp_path_factory.mktemp("models")
    shutil.copytree(tiny_checkpoint, root / "checkpoint")
    shutil.copytree(tiny_bundle, root / "bundle")
    shutil.copytree(tiny_masks[0].parent, root / "masks")
    write_gguf(tiny_checkpoint, root / "model.gguf")
    return root
