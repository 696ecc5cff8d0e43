"""Fixtures every test package shares: tiny checkpoints and the bundles exported from them, made once per run.

They need the `export` extra; where it is not installed the tests that ask for them are skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.shared import SharedFolder


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> SharedFolder:
    """What is made once for all workers of this run."""
    return SharedFolder.of_this_run(tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_checkpoint(shared: SharedFolder) -> Path:
    """Hugging Face directory of the verifier (see `tiny.write_verifier`)."""
    for module in ("torch", "transformers", "mobius"):
        pytest.importorskip(module, reason="needs the export extra")
    return shared.make("tiny-verifier", tiny.write_verifier)


@pytest.fixture(scope="session")
def tiny_drafter_checkpoint(shared: SharedFolder, tiny_checkpoint: Path) -> Path:
    """Hugging Face directory of a drafter for `tiny_checkpoint`, its vocabulary padded."""
    return shared.make("tiny-drafter", lambda path: tiny.write_drafter(path, tiny_checkpoint))


@pytest.fixture(scope="session")
def tiny_masks(shared: SharedFolder) -> tuple[Path, Path]:
    """Mask files for `tiny_checkpoint`: `slim.json`, and `deep.json` nested in it."""
    folder = shared.make("tiny-masks", tiny.write_masks)
    return folder / "slim.json", folder / "deep.json"


@pytest.fixture(scope="session")
def tiny_bundle(shared: SharedFolder, tiny_checkpoint: Path, tiny_masks: tuple[Path, Path]) -> Path:
    """Bundle of `tiny_checkpoint`: fp32, the slim mask, n-gram drafter, max_seq_len 256."""
    return shared.make("tiny-bundle", lambda out: tiny.write_bundle(tiny_checkpoint, out, tiny_masks[0], "ngram"))


@pytest.fixture(scope="session")
def tiny_bundle_mask_drafter(shared: SharedFolder, tiny_checkpoint: Path, tiny_masks: tuple[Path, Path]) -> Path:
    """As `tiny_bundle`, with the deeper mask as drafter."""
    slim, deep = tiny_masks
    return shared.make(
        "tiny-bundle-mask-drafter", lambda out: tiny.write_bundle(tiny_checkpoint, out, slim, f"mask:{deep}")
    )


@pytest.fixture(scope="session")
def tiny_bundle_model_drafter(
    shared: SharedFolder, tiny_checkpoint: Path, tiny_masks: tuple[Path, Path], tiny_drafter_checkpoint: Path
) -> Path:
    """As `tiny_bundle`, with a second model as drafter."""
    return shared.make(
        "tiny-bundle-model-drafter",
        lambda out: tiny.write_bundle(tiny_checkpoint, out, tiny_masks[0], str(tiny_drafter_checkpoint)),
    )
