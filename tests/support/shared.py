"""What the tests of one run share: made by the first worker that needs it, waited for by the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock


@dataclass(frozen=True)
class SharedFolder:
    """A folder that all workers of a test run see."""

    root: Path

    @classmethod
    def of_this_run(cls, tmp_path_factory: pytest.TempPathFactory) -> SharedFolder:
        base = tmp_path_factory.getbasetemp()
        root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
        root.mkdir(exist_ok=True)
        return cls(root)

    def make(self, name: str, build: Callable[[Path], object]) -> Path:
        """The path `name` in the folder, which `build` makes the first time it is asked for; nobody may change it.

        What `build` left when it failed is an error for every worker, not a thing half made.
        """
        path, done = self.root / name, self.root / f"{name}.done"
        with FileLock(self.root / f"{name}.lock"):
            if not done.exists():
                assert not path.exists(), f"{path} was left half made"
                build(path)
                done.touch()
        return path
