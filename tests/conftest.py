"""Fixtures every test package shares: tiny checkpoints and the bundles exported from them, made once per session.

They need the `export` extra; where it is not installed the tests that ask for them are skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tiny


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the session's tiny checkpoints, masks and bundles lie."""
    for module in ("torch", "transformers", "mobius"):
        pytest.importorskip(module, reason="needs the export extra")
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_directory: Path) -> Path:
    """Hugging Face directory of the verifier (see `tiny.write_verifier`)."""
    return tiny.write_verifier(tiny_directory / "verifier")


@pytest.fixture(scope="session")
def tiny_drafter_checkpoint(tiny_directory: Path, tiny_checkpoint: Path) -> Path:
    """Hugging Face directory of a drafter for `tiny_checkpoint`, its vocabulary padded."""
    return tiny.write_drafter(tiny_directory / "drafter", tiny_checkpoint)


@pytest.fixture(scope="session")
def tiny_masks(tiny_directory: Path) -> tuple[Path, Path]:
    """Mask files for `tiny_checkpoint`: `slim.json`, and `deep.json` nested in it."""
    (tiny_directory / "masks").mkdir()
    return tiny.write_masks(tiny_directory / "masks")


@pytest.fixture(scope="session")
def tiny_bundle(tiny_directory: Path, tiny_checkpoint: Path, tiny_masks: tuple[Path, Path]) -> Path:
    """Bundle of `tiny_checkpoint`: fp32, the slim mask, n-gram drafter, max_seq_len 256."""
    return _export(tiny_checkpoint, tiny_directory / "bundle", tiny_masks, "ngram")


@pytest.fixture(scope="session")
def tiny_bundle_mask_drafter(tiny_directory: Path, tiny_checkpoint: Path, tiny_masks: tuple[Path, Path]) -> Path:
    """As `tiny_bundle`, with the deeper mask as drafter."""
    return _export(tiny_checkpoint, tiny_directory / "bundle-mask-drafter", tiny_masks, f"mask:{tiny_masks[1]}")


@pytest.fixture(scope="session")
def tiny_bundle_model_drafter(
    tiny_directory: Path, tiny_checkpoint: Path, tiny_masks: tuple[Path, Path], tiny_drafter_checkpoint: Path
) -> Path:
    """As `tiny_bundle`, with a second model as drafter."""
    return _export(tiny_checkpoint, tiny_directory / "bundle-model-drafter", tiny_masks, str(tiny_drafter_checkpoint))


def _export(checkpoint: Path, out: Path, masks: tuple[Path, Path], drafter: str) -> Path:
    from via_sd.export import export_bundle

    return export_bundle(checkpoint, out, masks=[masks[0]], drafter=drafter, max_seq_len=tiny.MAX_SEQ_LEN)
