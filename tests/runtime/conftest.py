"""Pipelines over the tiny bundles, loaded once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pipelines import WatchedPipeline


@pytest.fixture(scope="session")
def tiny_pipelines(
    tiny_bundle: Path, tiny_bundle_mask_drafter: Path, tiny_bundle_model_drafter: Path
) -> dict[str, WatchedPipeline]:
    """By kind of drafter: `ngram`, `mask`, `model`. All have the same verifier and slim mask."""
    bundles = {"ngram": tiny_bundle, "mask": tiny_bundle_mask_drafter, "model": tiny_bundle_model_drafter}
    pipelines = {}
    for kind, path in bundles.items():
        pipelines[kind] = WatchedPipeline.load(path, threads=1)
        assert isinstance(pipelines[kind], WatchedPipeline)
    return pipelines
