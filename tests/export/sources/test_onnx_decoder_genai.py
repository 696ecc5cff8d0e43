"""Directories that the real ONNX Runtime GenAI model builder writes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.support.genai_layout import write_genai
from via_sd.export import ExportError, export_bundle
from via_sd.masks import Mask

pytest.importorskip("onnxruntime_genai", reason="builds with onnxruntime-genai")
pytestmark = pytest.mark.long

CAPACITY = 96
STEPS = (40, 5, 1, 1)
SLIM = Mask.from_flags((True, False, False, True), (True, True, False, False), name="slim")


@pytest.fixture(scope="module")
def build(checkpoint_of, tmp_path_factory):
    """A family's checkpoint through the builder, for the CPU."""
    root = tmp_path_factory.mktemp("genai")

    def run(family: str, precision: str = "fp32", *options: str) -> Path:
        target = root / "-".join((family, precision, *options))
        if not target.exists():
            command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint_of(family))]
            command += ["-o", str(target), "-p", precision, "-e", "cpu", "-c", str(root / "cache")]
            extra = ["--extra_options", *options] if options else []
            subprocess.run([*command, *extra], check=True, capture_output=True)
        return target

    return run


def check_of(bundle: Path) -> dict:
    return json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))["check"]


@pytest.mark.parametrize("family", ["llama", "llama-untied", "qwen2", "qwen3", "granite"])
def test_full_and_slim_compute_what_transformers_computes(
    family, build, checkpoint_of, reference, random_tokens, open_graph, tmp_path
):
    bundle = export_bundle(build(family), tmp_path / "b", masks=[SLIM], max_seq_len=CAPACITY)
    tokens = random_tokens(sum(STEPS))
    wanted = {
        "model.onnx": reference(checkpoint_of(family), tokens),
        "slim.onnx": reference(checkpoint_of(family), tokens, skip_attention=[1, 2], skip_mlp=[2, 3]),
    }
    for name, logits in wanted.items():
        session = open_graph(bundle / "verifier" / name, CAPACITY)
        assert np.abs(session.feed_in(STEPS, tokens) - logits).max() < 1e-4
    assert check_of(bundle)["max_abs_difference"] == 0


@pytest.mark.parametrize("capacity", [24, CAPACITY])
def test_windows_in_bounded_caches_are_windows_over_whole_ones(
    capacity, build, checkpoint_of, reference, random_tokens, open_graph, tmp_path
):
    """Gemma2 has one in every other layer; a buffer may be shorter than it, too."""
    bundle = export_bundle(build("gemma2"), tmp_path / "b", max_seq_len=capacity)
    assert check_of(bundle)["max_abs_difference"] == 0
    steps = STEPS if capacity == CAPACITY else (20, 3, 1)
    tokens = random_tokens(sum(steps))
    found = open_graph(bundle / "verifier/model.onnx", capacity).feed_in(steps, tokens)
    assert np.abs(found - reference(checkpoint_of("gemma2"), tokens)).max() < 1e-4


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("int4", ()),
        ("int4", ("int4_is_symmetric=false",)),
        ("int4", ("int4_block_size=64",)),
        ("int4", ("int4_algo_config=k_quant_mixed",)),
        ("int4", ("shared_embeddings=false",)),
        ("int8", ()),
    ],
)
def test_quantised_weights_compute_the_same_to_the_bit(precision, options, build, tmp_path):
    bundle = export_bundle(build("llama", precision, *options), tmp_path / "b", masks=[SLIM], max_seq_len=CAPACITY)
    assert json.loads((bundle / "bundle.json").read_text())["precision"] == precision
    assert check_of(bundle)["max_abs_difference"] == 0


@pytest.mark.parametrize(
    ("family", "precision", "option", "says"),
    [
        ("llama", "fp16", None, "is fp16"),
        ("llama", "fp32", "exclude_embeds=true", "takes inputs_embeds"),
        ("llama", "fp32", "exclude_lm_head=true", "has no output logits"),
        ("llama", "fp32", "prune_lm_head=true", "has logits of the last position only"),
    ],
)
def test_what_cannot_be_taken_is_refused(family, precision, option, says, build, tmp_path):
    with pytest.raises(ExportError, match=says):
        export_bundle(build(family, precision, *([option] if option else [])), tmp_path / "b")


def test_a_graph_that_lost_the_checkpoints_window_is_refused_beside_its_configuration(build, checkpoint_of, tmp_path):
    source = Path(shutil.copytree(build("mistral"), tmp_path / "mistral"))
    shutil.copyfile(checkpoint_of("mistral") / "config.json", source / "config.json")
    with pytest.raises(ExportError, match=r"no window.* in the graph, a window of 32"):
        export_bundle(source, tmp_path / "b")


@pytest.mark.parametrize("bits", [None, 4])
def test_the_tests_own_layout_is_the_builders(bits, build, checkpoint_of, tmp_path):
    """What the quick tests are made with: the same operators, inputs, outputs and names."""
    real = ir.load(build("llama", "fp32" if bits is None else "int4") / "model.onnx").graph
    ours = ir.load(write_genai(tmp_path / "ours", checkpoint_of("llama"), bits=bits) / "model.onnx").graph
    assert {n.op_type for n in ours} == {n.op_type for n in real}
    for kind in ("inputs", "outputs"):
        named = [{v.name: (v.dtype, len(v.shape)) for v in getattr(graph, kind)} for graph in (ours, real)]
        assert named[0] == named[1]
    attentions = [next(n for n in graph if n.op_type == "GroupQueryAttention") for graph in (ours, real)]
    said = [{name: attribute.value for name, attribute in node.attributes.items()} for node in attentions]
    assert said[0] == said[1]
