"""Engines on a GPU: the same KV and the same text as on the CPU. Skipped, and reported so, where there is no GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.backend_checks import check_against_the_routed_graph
from tests.support.pipelines import WatchedPipeline
from via_sd.runtime import BundleError, Pipeline, load_bundle
from via_sd.runtime.engines.portable import load_graphs
from via_sd.runtime.engines.rows import logits_of
from via_sd.runtime.engines.tensorrt import load_engines
from via_sd.runtime.engines.tensorrt.cuda import Cuda

pytestmark = pytest.mark.gpu

TARGET = "tensorrt-rtx"
PROMPTS = ("the thing in the end", "abc abc abc")


@pytest.fixture(scope="module")
def capability() -> str:
    """Compute capability of the GPU."""
    try:
        return Cuda().compute_capability
    except BundleError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=["engines", "graphs"])
def pipeline(request, capability, tiny_bundle_model_drafter, tmp_path_factory) -> Pipeline:
    """The tiny bundle in float32 on the GPU: its engines, or its portable graphs in ONNX Runtime."""
    pytest.importorskip("tensorrt_rtx", reason="needs the tensorrt-rtx extra")
    from via_sd.export.tensorrt import build_engines
    from via_sd.export.tensorrt.library import RTX_CAPABILITIES

    folder: Path = tmp_path_factory.mktemp("gpu") / "bundle"
    shutil.copytree(tiny_bundle_model_drafter, folder)
    build_engines(folder, dtype="fp32", tokens=(1, 4, 24), prefill=(1, 32, 64))
    bundle = load_bundle(folder)
    try:
        if request.param == "graphs":
            engines = load_graphs(bundle, TARGET, "cuda")
        elif capability not in RTX_CAPABILITIES:
            pytest.skip(f"TensorRT for RTX has no kernels for compute capability {capability}")
        else:
            engines = load_engines(bundle, TARGET, trust=True)
    except BundleError as error:
        pytest.skip(str(error))
    return Pipeline(bundle, *engines, max_sequences=4, retained_slots=1, slot_timeout=None)


def test_logits_equal_the_routed_graph_after_any_sequence_of_passes_and_rollbacks(
    pipeline: Pipeline, tiny_pipelines: dict[str, WatchedPipeline]
) -> None:
    check_against_the_routed_graph(pipeline.verifier, tiny_pipelines["model"].verifier)


def test_a_step_repeated_until_its_launches_are_captured_stays_the_same(pipeline):
    buffers = pipeline.verifier.new_buffers()
    tokens = list(range(40))
    buffers.forward("full", tokens, 0, 1)
    for tier in pipeline.verifier.tiers:
        first = logits_of(buffers.forward(tier, tokens[30:38], 30, 8))
        for _ in range(4):
            assert (logits_of(buffers.forward(tier, tokens[30:38], 30, 8)) == first).all()


@pytest.mark.parametrize("mode", ["plain", "speculative", "cascade", "routed"])
def test_every_mode_gives_the_text_it_gives_on_the_cpu(mode, pipeline, tiny_pipelines):
    for prompt in PROMPTS:
        options = {"mode": mode, "max_new_tokens": 48, "ignore_eos": True, "raw": True}
        found, wanted = (p.generate(prompt, **options) for p in (pipeline, tiny_pipelines["model"]))
        assert found.token_ids == wanted.token_ids


def test_sequences_side_by_side_do_not_disturb_each_other(pipeline):
    sequences = [pipeline.verifier.new_buffers() for _ in range(3)]
    texts = [[(7 * i + j) % 200 for j in range(30)] for i in range(3)]
    alone = [logits_of(pipeline.verifier.new_buffers().forward("full", text, 0, 4)) for text in texts]
    for buffers, text in zip(sequences, texts, strict=True):
        buffers.forward("full", text[:20], 0, 1)
    for buffers, text, wanted in zip(sequences, texts, alone, strict=True):
        assert abs(logits_of(buffers.forward("full", text[20:], 20, 4)) - wanted).max() < 1e-4 * abs(wanted).max()
