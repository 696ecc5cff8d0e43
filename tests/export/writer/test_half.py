"""Bundles in 16 bits: weights, activations and KV, with logits in float32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from via_sd.contract.kv import kv_bytes
from via_sd.errors import BundleError, ExportError
from via_sd.export import export_bundle
from via_sd.export.writer.check import FP16_TOLERANCE
from via_sd.export.writer.weights import initializers, load_graph
from via_sd.masks import Mask
from via_sd.runtime import GenerationConfig, Pipeline, load_bundle
from via_sd.runtime.engines.backends import open_engines
from via_sd.tools.search.graph import build

LAYERS = 4
SLIM = Mask.from_layers([True, False, True, True])
STEPS = (40, 5, 1)
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def bundles(checkpoint_of, tmp_path_factory) -> dict[str, Path]:
    """The same model and mask in each precision; `mixed` has a slim-verifier in int8."""
    root = tmp_path_factory.mktemp("half")
    verifier = checkpoint_of("llama")
    made = {
        precision: export_bundle(verifier, root / precision, masks=[SLIM], precision=precision, max_seq_len=96)
        for precision in ("fp32", "fp16", "bf16")
    }
    made["mixed"] = export_bundle(verifier, root / "mixed", slim_precision="int8", precision="fp16", max_seq_len=96)
    made["int4"], made["int4 in fp16"] = (
        export_bundle(verifier, root / f"int4-{act}", masks=[SLIM], precision="int4", activations=act, max_seq_len=96)
        for act in ("fp32", "fp16")
    )
    return made


def logits_of(bundle: Path, tier: str) -> np.ndarray:
    """Logits of every position of a text that is read in `STEPS`."""
    engine, _ = open_engines(load_bundle(bundle), threads=1)
    buffers = engine.new_buffers()
    tokens = np.random.default_rng(3).integers(0, engine.vocab_size, sum(STEPS)).tolist()
    found, past = [], 0
    for size in STEPS:
        rows = buffers.forward(tier, tokens[past : past + size], past, size)
        found += [row.logits.copy() for row in rows]
        past += size
    return np.stack(found)


@pytest.mark.parametrize("tier", ["full", "slim"])
def test_logits_in_float16_are_those_of_float32_within_two_hundredths(bundles, tier):
    name = tier if tier == "full" else json.loads((bundles["fp16"] / "bundle.json").read_text())["slim"]
    found, wanted = logits_of(bundles["fp16"], name), logits_of(bundles["fp32"], name)

    assert found.dtype == np.float32
    assert 0 < np.abs(found - wanted).max() <= FP16_TOLERANCE


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_weights_and_kv_take_half_the_space(bundles, precision):
    half, whole = (load_bundle(bundles[name]) for name in (precision, "fp32"))
    size, of_float32 = (
        sum(v.const_value.nbytes for v in initializers(load_graph(b.file(b.manifest["verifier"]["graph"]))))
        for b in (half, whole)
    )

    assert size < 0.51 * of_float32
    assert kv_bytes(half.manifest)["per_token"] * 2 == kv_bytes(whole.manifest)["per_token"]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_nothing_but_the_logits_is_float32(bundles, precision):
    bundle = load_bundle(bundles[precision])
    model = load_graph(bundle.file(bundle.manifest["verifier"]["graph"]))

    values = [*model.graph.inputs, *model.graph.outputs, *initializers(model)]
    assert [v.name for v in values if v.dtype == ir.DataType.FLOAT] == ["logits"]


@pytest.mark.parametrize("name", ["fp16", "mixed", "int4 in fp16"])
def test_exact_modes_write_the_greedy_text_of_plain(bundles, name):
    pipeline = Pipeline.load(bundles[name], threads=1)
    plain = pipeline.generate(PROMPT, GenerationConfig(mode="plain", max_new_tokens=24, temperature=0.0))

    for mode in ("speculative", "cascade"):
        found = pipeline.generate(PROMPT, GenerationConfig(mode=mode, max_new_tokens=24, temperature=0.0))
        assert found.token_ids == plain.token_ids
    routed = pipeline.generate(PROMPT, GenerationConfig(mode="routed", max_new_tokens=24, temperature=0.0))
    assert len(routed.token_ids) == len(plain.token_ids)


def test_quantised_weights_have_kv_in_float16_where_that_is_asked_for(bundles):
    half, whole = (load_bundle(bundles[name]) for name in ("int4 in fp16", "int4"))

    assert (half.precision, half.manifest["verifier"]["kv"]["dtype"]) == ("int4", "float16")
    assert kv_bytes(half.manifest)["per_token"] * 2 == kv_bytes(whole.manifest)["per_token"]
    found, wanted = (logits_of(bundles[name], "full") for name in ("int4 in fp16", "int4"))
    assert np.abs(found - wanted).max() <= 0.1 * np.abs(wanted).max()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_are_chosen_beside_quantised_weights_only(precision, checkpoint_of, tmp_path):
    with pytest.raises(ExportError, match=f"in fp16 do not go with weights in {precision}"):
        export_bundle(checkpoint_of("llama"), tmp_path / "out", precision=precision, activations="fp16")


def test_bf16_is_refused_where_there_are_no_kernels(bundles):
    with pytest.raises(BundleError, match=r"bf16.*takes fp32, int8, int4, fp16"):
        Pipeline.load(bundles["bf16"])
    with pytest.raises(BundleError, match="no kernels on a CPU; export it in fp16"):
        open_engines(load_bundle(bundles["bf16"]))


def test_a_model_that_float16_cannot_hold_is_refused(checkpoint_of, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint_of("llama"))
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = 1e5
    model.save_pretrained(tmp_path / "large")
    for file in Path(checkpoint_of("llama")).glob("tokenizer*"):
        (tmp_path / "large" / file.name).write_bytes(file.read_bytes())

    with pytest.raises(ExportError, match=r"reaches 1e\+05, more than FLOAT16 holds; use bf16"):
        export_bundle(tmp_path / "large", tmp_path / "out", precision="fp16", max_seq_len=96)


def test_bridges_are_refused_in_16_bits(checkpoint_of, tmp_path):
    mask = Mask(("keep", "bridge", "keep", "keep"), ("keep", "bridge", "keep", "keep"), "keep")

    with pytest.raises(ExportError, match="bridges, which are fitted in float32, and activations are fp16"):
        export_bundle(checkpoint_of("llama"), tmp_path / "out", masks=[mask], precision="fp16", max_seq_len=96)


def test_a_search_asks_for_another_precision(bundles, tmp_path):
    with pytest.raises(ExportError, match="has activations in float16, and masks are searched with"):
        build(str(bundles["fp16"]), tmp_path)
