"""Where documents and examples are run: a folder with what a reader has at that point."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support import ROOT


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The commands that were installed with the package under test come first; modules of the clone can be run."""
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "XDG_STATE_HOME": str(tmp_path_factory.mktemp("state")),
    }


@pytest.fixture
def clone(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A folder that stands for a clone, with its examples, and a checkpoint in `model`."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    return tmp_path


@pytest.fixture
def clone_with_mask(clone: Path, tiny_masks: tuple[Path, Path]) -> Path:
    """The same, with masks in `slim.json` and `deep.json`, and prompts in `prompts.jsonl`."""
    for file in (*tiny_masks, Path(__file__).with_name("prompts.jsonl")):
        shutil.copy(file, clone)
    return clone


@pytest.fixture
def clone_with_bundle(clone_with_mask: Path, tiny_bundle: Path) -> Path:
    """The same, with the bundle of checkpoint and mask in `bundle`."""
    shutil.copytree(tiny_bundle, clone_with_mask / "bundle")
    return clone_with_mask
