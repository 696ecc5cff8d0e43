"""A decoder that another exporter made becomes a bundle that computes what it computes, its weights as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.support.command_line import invoke
from tests.support.genai_layout import HEAD, write_genai
from tests.support.portable_session import open_portable
from via_sd.export import ExportError, export_bundle
from via_sd.export.passes import FuseGateUpPass
from via_sd.export.passes.lower import lower
from via_sd.export.portable import to_portable
from via_sd.export.sources.checkpoint import open_checkpoint
from via_sd.export.tensorrt.source import open_decoder, read_source
from via_sd.export.writer.check import FP32_TOLERANCE, check_logits, source_logits
from via_sd.export.writer.stepper import Stepper
from via_sd.masks import Mask, write_mask
from via_sd.progress import no_progress
from via_sd.runtime import Pipeline
from via_sd.tools.search import evaluator
from via_sd.tools.search.evaluator import load_search_model
from via_sd.tools.search.graph import build as build_search_graph

CAPACITY = 96
SLIM = Mask.from_flags((True, False, False, True), (True, True, False, False), name="slim")
DEEP = Mask.from_flags((True, False, False, False), (True, False, False, False), name="deep")
STEPS = (40, 5, 1, 1)
FAMILIES = ("llama", "llama-untied", "qwen2", "mistral", "granite")
BITS = {4: "int4", 8: "int8"}
PROMPTS = ("Once there was", "abcabcabcabcabc", "The keeper of the light")


@pytest.fixture(scope="module")
def decoders(checkpoint_of, shared):
    """The directory of a family's decoder in the builder's layout, float32 or quantised, made once."""

    def build(family: str = "llama", bits: int | None = None) -> Path:
        checkpoint = checkpoint_of(family)
        return shared.make(f"genai-{family}-{bits or 32}", lambda out: write_genai(out, checkpoint, bits=bits))

    return build


def manifest_of(bundle: Path) -> dict:
    return json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))


def weights_of(graph: ir.Graph) -> dict[str, np.ndarray]:
    return {name: value.const_value.numpy() for name, value in graph.initializers.items()}


# -- float32 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_full_and_slim_compute_what_transformers_computes_on_the_checkpoint(
    family, decoders, checkpoint_of, reference, random_tokens, open_graph, tmp_path
):
    bundle = export_bundle(decoders(family), tmp_path / "b", masks=[SLIM], max_seq_len=CAPACITY)
    tokens = random_tokens(sum(STEPS))
    full = reference(checkpoint_of(family), tokens)
    slim = reference(checkpoint_of(family), tokens, skip_attention=[1, 2], skip_mlp=[2, 3])
    routed = open_graph(bundle / "verifier/model.onnx", CAPACITY)
    keep = manifest_of(bundle)["verifier"]["tiers"]["slim"]["keep"]
    assert np.abs(routed.feed_in(STEPS, tokens) - full).max() < 1e-4
    routed.rewind()
    slim_routed = routed.feed_in(STEPS, tokens, keep)
    assert np.abs(slim_routed - slim).max() < 1e-4
    assert np.array_equal(slim_routed, open_graph(bundle / "verifier/slim.onnx", CAPACITY).feed_in(STEPS, tokens))


def test_the_export_is_checked_against_the_graph_it_came_from(decoders, tmp_path):
    check = manifest_of(export_bundle(decoders(), tmp_path / "b", max_seq_len=CAPACITY))["check"]
    assert check["against"] == "the source graph"
    assert check["positions"] == 47
    assert check["max_abs_difference"] < FP32_TOLERANCE


def test_a_graph_that_computes_something_else_than_its_source_is_caught(decoders, workshop):
    with open_checkpoint(decoders()) as found:
        lower(found.model, found.config, CAPACITY)
        reference = source_logits(found.source, CAPACITY, found.config)
        check_logits(Stepper(workshop.save(found.model, "right")), reference, quantised=False)
        weight = next(v for name, v in found.model.graph.initializers.items() if "layers.3.mlp.down_proj" in name)
        weight.const_value = ir.tensor(weight.const_value.numpy() * 1.01, name=weight.name)
        with pytest.raises(ExportError, match=r"differs from the source graph by .* in a logit"):
            check_logits(Stepper(workshop.save(found.model, "wrong")), reference, quantised=False)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("bits", [None, 4])
def test_masks_know_it_by_the_name_they_know_the_checkpoint_by(family, bits, decoders, checkpoint_of):
    with open_checkpoint(decoders(family, bits)) as found, open_checkpoint(checkpoint_of(family)) as checkpoint:
        assert found.identity == checkpoint.identity


def test_embedding_and_head_have_one_table_in_the_weights_file(decoders, checkpoint_of, tmp_path):
    sizes = [
        (export_bundle(source, tmp_path / name, max_seq_len=CAPACITY) / "verifier/weights.data").stat().st_size
        for name, source in (("checkpoint", checkpoint_of("llama")), ("decoder", decoders()))
    ]
    assert abs(sizes[0] - sizes[1]) <= 4096  # a page
    assert HEAD not in weights_of(ir.load(tmp_path / "decoder/verifier/model.onnx").graph)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_it_is_quantised_as_a_checkpoint_is(precision, decoders, checkpoint_of, tmp_path):
    """The same bytes, wherever the float32 weights came from: int8 has nothing to fit to activations."""
    bundles = [
        export_bundle(source, tmp_path / name, precision=precision, max_seq_len=CAPACITY)
        for name, source in (("checkpoint", checkpoint_of("llama")), ("decoder", decoders()))
    ]
    assert [manifest_of(bundle)["precision"] for bundle in bundles] == [precision] * 2
    found, wanted = (manifest_of(bundle)["check"]["mean_kl"] for bundle in reversed(bundles))
    assert found == pytest.approx(wanted, rel=1e-3)
    assert found < {"int8": 1e-3, "int4": 0.1}[precision]
    tables = [
        sorted(
            (v for v in weights_of(ir.load(bundle / "verifier/model.onnx").graph).values() if v.dtype == np.uint8),
            key=lambda array: (array.shape, array.tobytes()),
        )
        for bundle in bundles
    ]
    assert [t.shape for t in tables[0]] == [t.shape for t in tables[1]]
    if precision == "int8":
        assert all(np.array_equal(a, b) for a, b in zip(*tables, strict=True))


# -- quantised already -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
def test_quantised_weights_are_kept_and_compute_the_same(bits, decoders, tmp_path):
    source = decoders("llama", bits)
    bundle = export_bundle(source, tmp_path / "b", masks=[SLIM], max_seq_len=CAPACITY)
    manifest = manifest_of(bundle)
    assert manifest["precision"] == BITS[bits]
    assert manifest["check"]["max_abs_difference"] < FP32_TOLERANCE
    wanted = weights_of(ir.load(source / "model.onnx").graph)
    found = weights_of(ir.load(bundle / "verifier/model.onnx").graph)
    fused = [name for name in found if "+" in name]
    assert len(fused) == 2 * 4  # blocks and scales of gate and up, side by side
    for name in fused:
        parts = [wanted.pop(part) for part in name.split("+")]
        assert np.array_equal(found[name], np.concatenate(parts))
    tables = {name: array for name, array in wanted.items() if re.search(r"\.(q\d|scales)$", name)}
    assert len(tables) == 2 * (3 * 4 + 1)  # QKV, attention output and down projection of four layers, and the head
    assert all(np.array_equal(found[name], array) for name, array in tables.items())
    assert np.array_equal(found[f"{HEAD}.q{bits}.rows"].ravel(), wanted[f"{HEAD}.q{bits}"].ravel())


@pytest.mark.parametrize("bits", BITS)
def test_a_quantised_vocabulary_is_stored_once(bits, decoders, tmp_path):
    bundle = export_bundle(decoders("llama", bits), tmp_path / "b", max_seq_len=CAPACITY)
    initializers = ir.load(bundle / "verifier/model.onnx").graph.initializers
    places = {initializers[name].const_value.offset for name in (f"{HEAD}.q{bits}", f"{HEAD}.q{bits}.rows")}
    assert len(places) == 1


def test_products_with_zero_points_are_fused_and_those_with_a_bias_are_not(tmp_path):
    """Every output column keeps its blocks, scale and zero points; what a bias would do is left alone."""

    def graph_of(extra: int) -> ir.Model:
        hidden = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, 3, 64]))
        random = np.random.default_rng(0)
        graph = ir.Graph([hidden], [], nodes=[], opset_imports={"": 22, "com.microsoft": 1}, name="twins")
        operands = {
            "blocks": random.integers(0, 256, (32, 2, 16), dtype=np.uint8),
            "scales": random.random((32, 2), dtype=np.float32),
            "zero_points": random.integers(0, 256, (32, 1), dtype=np.uint8),
        }
        for side in ("gate", "up"):
            inputs = [hidden]
            for part, like in operands.items():
                array = np.roll(like, len(side))
                value = ir.Value(name=f"{side}.{part}", const_value=ir.tensor(array, name=f"{side}.{part}"))
                value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(array.shape)
                graph.register_initializer(value)
                inputs.append(value)
            if extra:
                name = f"{side}.bias"
                bias = ir.Value(name=name, const_value=ir.tensor(np.ones(32, np.float32), name=name))
                bias.type, bias.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([32])
                graph.register_initializer(bias)
                inputs += [None, bias]
            attributes = {"K": 64, "N": 32, "bits": 4, "block_size": 32}
            node = ir.node("MatMulNBits", inputs, attributes, domain="com.microsoft", name=side)
            node.outputs[0].name, node.outputs[0].type = f"{side}_out", ir.TensorType(ir.DataType.FLOAT)
            graph.append(node)
            graph.outputs.append(node.outputs[0])
        return ir.Model(graph, ir_version=10)

    import onnxruntime as ort

    def run(model: ir.Model) -> list[np.ndarray]:
        ir.save(model, tmp_path / "twins.onnx")
        session = ort.InferenceSession(tmp_path / "twins.onnx", providers=["CPUExecutionProvider"])
        return session.run(None, {"x": np.random.default_rng(1).random((1, 3, 64), dtype=np.float32)})

    plain, fused = graph_of(0), graph_of(0)
    assert FuseGateUpPass()(fused).modified
    assert sum(node.op_type == "MatMulNBits" for node in fused.graph) == 1
    for one, other in zip(run(plain), run(fused), strict=True):
        assert np.array_equal(one, other)
    assert not FuseGateUpPass()(graph_of(1)).modified


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_another_precision_than_the_weights_have_is_refused(precision, decoders, tmp_path):
    with pytest.raises(ExportError, match=rf"are int4 already, wanted {precision}: .* give --precision int4"):
        export_bundle(decoders("llama", 4), tmp_path / "b", precision=precision)
    assert not (tmp_path / "b").exists()


def test_the_command_takes_the_precision_of_the_graph_unless_it_is_told(decoders, tmp_path):
    for name, options in (("told", ["--precision", "int4"]), ("not-told", [])):
        out = tmp_path / name
        result = invoke("export", decoders("llama", 4), "--out", out, "--max-seq-len", CAPACITY, *options)
        assert result.exit_code == 0, result.stderr
        assert manifest_of(out)["precision"] == "int4"
    result = invoke("export", decoders(), "--out", tmp_path / "float", "--max-seq-len", CAPACITY)
    assert result.exit_code == 0
    assert manifest_of(tmp_path / "float")["precision"] == "fp32"


# -- what attention means --------------------------------------------------------------------------------------------


def test_a_window_and_its_bounded_cache_become_a_window_over_our_buffers(decoders, checkpoint_of, reference, tmp_path):
    source = decoders("mistral")
    wanted = [node for node in ir.load(source / "model.onnx").graph if node.op_type == "GroupQueryAttention"]
    assert {node.attributes["sliding_window_cache"].as_int() for node in wanted} == {1}
    with open_checkpoint(source) as found:
        lower(found.model, found.config, 128)
        assert source_logits(found.source, 128, found.config).chunks[0] > found.config["sliding_window"]
        for node in found.model.graph:
            if node.op_type == "GroupQueryAttention":
                assert "sliding_window_cache" not in node.attributes
                assert node.attributes["local_window_size"].as_int() == 32
    # A buffer shorter than the window is none the graph itself would run with.
    assert export_bundle(source, tmp_path / "short", max_seq_len=24).is_dir()


def test_what_a_graph_says_of_its_attention_stays_as_it_is(checkpoint_of, tmp_path):
    def peculiar(model: ir.Model) -> None:
        for layer, node in enumerate(n for n in model.graph if n.op_type == "GroupQueryAttention"):
            node.attributes["scale"] = ir.AttrFloat32("scale", 0.3)
            node.attributes["softcap"] = ir.AttrFloat32("softcap", 20.0)
            if layer % 2:
                node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", 16)

    source = write_genai(tmp_path / "genai", checkpoint_of("llama"), change=peculiar)
    bundle = export_bundle(source, tmp_path / "b", max_seq_len=CAPACITY)
    said = [
        tuple(node.attributes[name].value for name in ("local_window_size", "scale", "softcap"))
        for node in ir.load(bundle / "verifier/model.onnx").graph
        if node.op_type == "GroupQueryAttention"
    ]
    scale = float(np.float32(0.3))
    assert said == [(window, scale, 20.0) for window in (-1, 16, -1, 16)]


def test_a_model_configuration_beside_the_graph_is_read(checkpoint_of, tmp_path):
    source = write_genai(tmp_path / "genai", checkpoint_of("mistral"))
    config = json.loads((checkpoint_of("mistral") / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 80, "eos_token_id": 259}))
    manifest = manifest_of(export_bundle(source, tmp_path / "b"))
    assert manifest["max_seq_len"] == 80
    assert manifest["tokenizer"]["eos_token_ids"] == [257, 259]
    (source / "genai_config.json").unlink()  # it is enough alone
    assert manifest_of(export_bundle(source, tmp_path / "alone"))["max_seq_len"] == 80


def test_a_model_configuration_that_says_another_thing_of_attention_is_refused(checkpoint_of, tmp_path):
    """As of a graph that a builder wrote without the checkpoint's window: it would be wrong from there on."""

    def blind(model: ir.Model) -> None:
        for node in model.graph:
            if node.op_type == "GroupQueryAttention":
                node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", -1)
                del node.attributes["sliding_window_cache"]

    source = write_genai(tmp_path / "genai", checkpoint_of("mistral"), change=blind)
    (source / "config.json").write_text((checkpoint_of("mistral") / "config.json").read_text())
    says = r"disagree on the attention of layer 0: no window.* in the graph, a window of 32.*; export from the Hugging"
    with pytest.raises(ExportError, match=says):
        export_bundle(source, tmp_path / "b")


# -- everything behind an export -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_decoder(tiny_checkpoint, tmp_path_factory) -> Path:
    return write_genai(tmp_path_factory.mktemp("tiny-genai") / "decoder", tiny_checkpoint)


def test_greedy_text_in_every_exact_mode_is_that_of_the_checkpoints_bundle(
    tiny_decoder, tiny_bundle, tiny_masks, tmp_path
):
    bundle = export_bundle(
        tiny_decoder, tmp_path / "b", masks=[tiny_masks[0]], drafter=f"mask:{tiny_masks[1]}", max_seq_len=256
    )
    ours, checkpoints = Pipeline.load(bundle), Pipeline.load(tiny_bundle)
    for prompt in PROMPTS:
        wanted = checkpoints.generate(prompt, mode="plain", max_new_tokens=48, ignore_eos=True)
        assert len(wanted.token_ids) == 48
        for mode in ("plain", "speculative", "cascade"):
            found = ours.generate(prompt, mode=mode, max_new_tokens=48, ignore_eos=True)
            assert found.token_ids == wanted.token_ids, mode


def test_a_chat_goes_through_the_template_beside_the_graph(tiny_decoder, tiny_bundle, tmp_path):
    bundle = export_bundle(tiny_decoder, tmp_path / "b", max_seq_len=128)
    chat = [{"role": "user", "content": "Hello"}]
    assert Pipeline.load(bundle).encode(chat) == Pipeline.load(tiny_bundle).encode(chat)


def test_it_drafts_for_another_model(tiny_checkpoint, tiny_decoder, tmp_path):
    bundle = export_bundle(tiny_checkpoint, tmp_path / "b", drafter=str(tiny_decoder), max_seq_len=128)
    assert manifest_of(bundle)["drafter"]["kind"] == "model"
    pipeline = Pipeline.load(bundle)
    plain = pipeline.generate(PROMPTS[0], mode="plain", max_new_tokens=32, ignore_eos=True)
    drafted = pipeline.generate(PROMPTS[0], mode="speculative", max_new_tokens=32, ignore_eos=True)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.rejection_rate < 0.1  # it is the verifier itself


def test_a_quantised_drafter_wants_a_bundle_of_its_precision(tiny_checkpoint, tmp_path):
    drafter = write_genai(tmp_path / "drafter", tiny_checkpoint, bits=8)
    with pytest.raises(ExportError, match=r"drafter are int8 already, wanted fp32"):
        export_bundle(tiny_checkpoint, tmp_path / "b", drafter=str(drafter), max_seq_len=128)
    bundle = export_bundle(
        tiny_checkpoint, tmp_path / "b", drafter=str(drafter), precision="int8", max_seq_len=128, check=False
    )
    assert manifest_of(bundle)["drafter"]["vocab_size"] == manifest_of(bundle)["verifier"]["vocab_size"]


@pytest.mark.parametrize("bits", [None, 4])
def test_a_search_runs_it_as_it_is(bits, decoders, checkpoint_of, monkeypatch):
    monkeypatch.setattr(evaluator, "build_apart", build_search_graph)  # the tests of the search start the process
    found = load_search_model(decoders("llama", bits), threads=1)
    assert found.precision == ("fp32" if bits is None else "int4")
    greedy = found.session.greedy(list(range(20)), 24, frozenset())
    if bits is None:
        wanted = load_search_model(checkpoint_of("llama"), threads=1)
        assert found.model == wanted.model
        assert greedy == wanted.session.greedy(list(range(20)), 24, frozenset())
    assert len(greedy) == 24


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_its_portable_graph_computes_what_transformers_computes(family, decoders, checkpoint_of, reference, tmp_path):
    tokens = np.random.default_rng(1).integers(0, 256, (1, 47))
    with open_checkpoint(decoders(family)) as found:
        lower(found.model, found.config, CAPACITY)
        session = open_portable(to_portable(found.model, max_seq_len=CAPACITY), tmp_path / "model.onnx")
    assert np.abs(session.feed_in(STEPS, tokens)[0] - reference(checkpoint_of(family), tokens[0])).max() < 1e-4


def test_engines_are_built_from_it_unless_it_is_quantised(decoders, checkpoint_of, tmp_path):
    bundle = read_source(export_bundle(checkpoint_of("llama"), tmp_path / "b", precision="int8", check=False))
    with open_decoder(bundle, bundle.decoders[0], decoders(), no_progress) as model:
        assert "logits" in [value.name for value in model.graph.outputs]
    with (
        pytest.raises(ExportError, match=r"--reference .* has int4 weights, and engines are built from unquantised"),
        open_decoder(bundle, bundle.decoders[0], decoders("llama", 4), no_progress),
    ):
        pass


def test_validate_takes_the_checkpoint_and_says_why_it_does_not_take_the_graph(tiny_decoder, tiny_checkpoint, tmp_path):
    pytest.importorskip("polygraphy", reason="needs the polygraphy extra")
    bundle = export_bundle(tiny_decoder, tmp_path / "b", max_seq_len=128)
    assert invoke("validate", bundle, "--reference", tiny_checkpoint).exit_code == 0
    result = invoke("validate", bundle, "--reference", tiny_decoder)
    assert result.exit_code == 2
    assert "holds an ONNX decoder, and validate compares with transformers; give the checkpoint" in result.stderr


def test_the_directory_is_read_and_not_written(decoders, tmp_path):
    source = decoders("llama", 4)
    before = {p: p.read_bytes() for p in source.rglob("*")}
    write_mask(DEEP, tmp_path / "deep.json")
    export_bundle(source, tmp_path / "b", masks=[SLIM], drafter=f"mask:{tmp_path / 'deep.json'}")
    assert {p: p.read_bytes() for p in source.rglob("*")} == before
