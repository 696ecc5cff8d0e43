"""A decoder of another exporter that cannot be taken is refused with what was found, what was wanted and what to do."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.support.genai_layout import write_genai
from via_sd.export import ExportError, UnsupportedModelError, export_bundle
from via_sd.export.sources.checkpoint import open_checkpoint

ADVICE = "export the model with the ONNX Runtime GenAI model builder for the CPU"


@pytest.fixture(scope="module")
def original(checkpoint_of, shared) -> Path:
    checkpoint = checkpoint_of("llama")
    return shared.make("genai-llama-32", lambda out: write_genai(out, checkpoint))


@pytest.fixture
def decoder(original, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "decoder"))


def refused(source: Path, *says: str, kind: type[Exception] = ExportError) -> None:
    with pytest.raises(kind) as caught, open_checkpoint(source):
        pass
    message = str(caught.value)
    for text in says:
        assert text in message, message
    assert "\n" not in message


def rewrite(decoder: Path, change: Callable[[ir.Graph], object]) -> None:
    """Change the graph in its file."""
    model = ir.load(decoder / "model.onnx")
    change(model.graph)
    ir.save(model, decoder / "changed.onnx")  # its weights stay where they are
    (decoder / "changed.onnx").replace(decoder / "model.onnx")


def redescribe(decoder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = decoder / "genai_config.json"
    config = json.loads(file.read_text())
    change(config["model"])
    file.write_text(json.dumps(config))


def attentions(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if node.op_type == "GroupQueryAttention"]


# -- graphs ----------------------------------------------------------------------------------------------------------


def attend_otherwise(op_type: str) -> Callable[[ir.Graph], None]:
    def change(graph: ir.Graph) -> None:
        for node in attentions(graph):
            node.op_type = op_type

    return change


def hold(dtype: ir.DataType) -> Callable[[ir.Graph], None]:
    def change(graph: ir.Graph) -> None:
        weight = next(value for name, value in graph.initializers.items() if "input_layernorm" in name)
        weight.const_value = ir.tensor(weight.const_value.numpy().astype(dtype.numpy()), dtype=dtype, name=weight.name)
        weight.type = ir.TensorType(dtype)

    return change


def take_more(name: str) -> Callable[[ir.Graph], None]:
    return lambda graph: graph.inputs.append(ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64)))


def give_attention(index: int) -> Callable[[ir.Graph], None]:
    def change(graph: ir.Graph) -> None:
        node = attentions(graph)[1]
        node.resize_inputs(index + 1)
        node.replace_input_with(index, attentions(graph)[1].inputs[7])

    return change


def read_mask(graph: ir.Graph) -> None:
    mask = next(value for value in graph.inputs if value.name == "attention_mask")
    norm = next(node for node in graph if node.op_type == "SimplifiedLayerNormalization")
    weighted = ir.node("Mul", [norm.inputs[0], mask], name="masked")
    weighted.outputs[0].name = "masked"
    graph.insert_before(norm, weighted)
    norm.replace_input_with(0, weighted.outputs[0])


def read_cache(graph: ir.Graph) -> None:
    shape = ir.node("Shape", [attentions(graph)[0].inputs[3]], name="past_length")
    shape.outputs[0].name = "past_length"
    graph.append(shape)


def set_attribute(name: str, value: Any, layers: slice = slice(None)) -> Callable[[ir.Graph], None]:
    def change(graph: ir.Graph) -> None:
        for node in attentions(graph)[layers]:
            kind = ir.AttrInt64 if isinstance(value, int) else ir.AttrFloat32
            node.attributes[name] = kind(name, value)

    return change


def retype_input(name: str, dtype: ir.DataType) -> Callable[[ir.Graph], None]:
    def change(graph: ir.Graph) -> None:
        value = next(value for value in graph.inputs if value.name == name)
        value.type = ir.TensorType(dtype)

    return change


def quantise_foreignly(graph: ir.Graph) -> None:
    weight = next(iter(graph.initializers.values()))
    node = ir.node("DequantizeLinear", [weight, weight], name="dequantised")
    node.outputs[0].name = "dequantised"
    graph.append(node)


def quantise_to(bits: int) -> Callable[[ir.Graph], None]:
    def change(graph: ir.Graph) -> None:
        product = next(node for node in graph if node.op_type == "MatMul")
        product.op_type, product.domain = "MatMulNBits", "com.microsoft"
        product.attributes["bits"] = ir.AttrInt64("bits", bits)

    return change


def prune_logits(graph: ir.Graph) -> None:
    logits = next(value for value in graph.outputs if value.name == "logits")
    logits.shape = ir.Shape(["batch_size", 1, 320])


GRAPHS: dict[str, tuple[Callable[[ir.Graph], object], tuple[str, ...]]] = {
    "decomposed attention": (
        attend_otherwise("Softmax"),
        ("has no GroupQueryAttention (attention it has: Softmax)", "wanted one in every layer", ADVICE),
    ),
    "multi-head attention": (
        attend_otherwise("MultiHeadAttention"),
        ("has no GroupQueryAttention (attention it has: MultiHeadAttention)", "Hugging Face checkpoint"),
    ),
    "no attention": (attend_otherwise("Identity"), ("(attention it has: none)",)),
    "fp16": (hold(ir.DataType.FLOAT16), ("is fp16 (", "wanted float32 activations and KV", ADVICE)),
    "bf16": (hold(ir.DataType.BFLOAT16), ("is bf16 (", "wanted float32 activations and KV", ADVICE)),
    "positions": (
        take_more("position_ids"),
        ("takes position_ids; wanted no inputs but input_ids and",),
    ),
    "attention bias": (give_attention(10), ("gives its attention attention_bias; wanted lengths",)),
    "scaled KV": (give_attention(12), ("gives its attention k_scale",)),
    "the mask elsewhere": (read_mask, ("uses attention_mask for more than lengths (input 0 of GroupQueryAttention)",)),
    "the cache elsewhere": (read_cache, ("has a KV cache (past_key_values.0.key) that attention does not have to",)),
    "no causality": (set_attribute("causal", 0), ("has attention that is not causal; wanted a decoder",)),
    "two windows": (
        lambda graph: (
            set_attribute("local_window_size", 16, slice(2))(graph),
            set_attribute("local_window_size", 24, slice(2, 4))(graph),
        ),
        ("differs from layer to layer in the size of its window", ADVICE),
    ),
    "two scales": (set_attribute("scale", 0.5, slice(2)), ("differs from layer to layer",)),
    "two counts of KV heads": (set_attribute("kv_num_heads", 1, slice(1)), ("layers with [1, 2] KV heads",)),
    "tokens as int32": (retype_input("input_ids", ir.DataType.INT32), ("takes tokens as INT32; wanted int64",)),
    "KV as int8": (
        retype_input("past_key_values.2.key", ir.DataType.INT8),
        ("has a KV cache of INT8 (past_key_values.2.key); wanted float32",),
    ),
    "an old opset": (
        lambda graph: graph.opset_imports.__setitem__("", 14),
        ("is of opset 14; wanted opset 18 or newer",),
    ),
    "other quantisation": (
        quantise_foreignly,
        ("is quantised with DequantizeLinear; wanted float32 weights",),
    ),
    "two bits": (quantise_to(2), ("has weights in 2 bits; wanted 4 or 8",)),
    "the last logits only": (prune_logits, ("has logits of the last position only (prune_lm_head)",)),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_that_cannot_be_taken_is_refused(name, decoder):
    change, says = GRAPHS[name]
    rewrite(decoder, change)
    refused(decoder, str(decoder / "model.onnx"), *says, kind=UnsupportedModelError)


def test_a_graph_that_is_changed_in_nothing_is_taken(decoder):
    """What the tests above do to a graph, and not the way they do it, is what is refused."""
    rewrite(decoder, lambda graph: None)
    with open_checkpoint(decoder) as found:
        assert found.precision is None


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"no protobuf", b"\x00" * 40])
def test_a_damaged_graph_is_refused(content, decoder):
    (decoder / "model.onnx").write_bytes(content)
    refused(decoder, "model.onnx is damaged", "fetch or export it again")


def test_a_graph_that_is_cut_short_is_refused(decoder):
    file = decoder / "model.onnx"
    file.write_bytes(file.read_bytes()[:-3])
    refused(decoder, "model.onnx is damaged", "fetch or export it again")


def test_missing_weights_are_refused(decoder):
    (decoder / "model.onnx.data").unlink()
    refused(decoder, "keeps its weights in model.onnx.data, which is not there; copy both files together")


def test_weights_that_are_cut_short_are_refused(decoder):
    file = decoder / "model.onnx.data"
    file.write_bytes(file.read_bytes()[:-100])
    refused(decoder, "model.onnx.data is cut short: it has", "wanted", "fetch it again")


def test_weights_outside_the_directory_are_refused(decoder):
    def move(graph: ir.Graph) -> None:
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                place = (tensor.offset, tensor.length, tensor.dtype)
                value.const_value = ir.ExternalTensor(
                    "../model.onnx.data", *place, shape=tensor.shape, name=tensor.name, base_dir=decoder
                )

    (decoder / "model.onnx.data").rename(decoder.parent / "model.onnx.data")
    model = ir.load(decoder / "model.onnx")
    move(model.graph)
    ir.save(model, decoder / "model.onnx")
    refused(decoder, "keeps weights in ../model.onnx.data; wanted a file beside it")


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_weights_behind_a_link_are_refused(link, decoder, tmp_path):
    """Neither onnx-ir nor ONNX Runtime follows one out of the directory."""
    (decoder / "model.onnx.data").rename(tmp_path / "elsewhere")
    link(decoder / "model.onnx.data", tmp_path / "elsewhere")
    refused(decoder, "model.onnx.data is a link, and weights are read from plain files only; copy the directory")


def test_a_graph_that_onnx_runtime_cannot_run_is_refused(decoder, tmp_path):
    def misspell(graph: ir.Graph) -> None:
        next(node for node in graph if node.op_type == "Sigmoid").op_type = "Sigmund"

    rewrite(decoder, misspell)
    with pytest.raises(ExportError, match=r"ONNX Runtime cannot run .*model\.onnx: .*Sigmund"):
        export_bundle(decoder, tmp_path / "b")


def test_damaged_weights_are_named_by_what_they_compute(decoder, tmp_path):
    weights = decoder / "model.onnx.data"
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    with pytest.raises(ExportError, match="the source graph gives NaN or Inf among its logits: the weights"):
        export_bundle(decoder, tmp_path / "b")


def test_a_directory_without_a_tokenizer_is_refused(decoder, tmp_path):
    (decoder / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match=r"has no tokenizer\.json; load it with transformers\.AutoTokenizer"):
        export_bundle(decoder, tmp_path / "b", check=False)
    assert not (tmp_path / "b").exists()


def test_several_graphs_of_which_none_is_named_are_refused(decoder):
    (decoder / "genai_config.json").unlink()
    (decoder / "model.onnx").rename(decoder / "decoder_model.onnx")
    (decoder / "decoder_with_past_model.onnx").write_bytes(b"")
    refused(decoder, "has no model.onnx (its graphs: decoder_model.onnx, decoder_with_past_model.onnx)", "wanted one")


def test_a_graph_that_the_configuration_names_and_is_not_there_is_refused(decoder):
    redescribe(decoder, lambda model: model["decoder"].update(filename="decoder.onnx"))
    refused(decoder, "has no decoder.onnx (its graphs: model.onnx)", "named in genai_config.json")


def test_a_graph_without_any_configuration_is_refused(decoder):
    (decoder / "genai_config.json").unlink()
    refused(decoder, "has neither genai_config.json nor config.json; wanted one of them beside model.onnx")


def test_a_graph_given_as_a_file_is_refused(decoder):
    refused(decoder / "model.onnx", "model.onnx is a graph alone; give the directory")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda model: model.update(vision={"filename": "vision.onnx"}), "describes vision besides a decoder"),
        (lambda model: model.update(encoder={}, embedding={}), "describes encoder, embedding besides a decoder"),
        (lambda model: model["decoder"].update(pipeline=[{}]), "describes a pipeline besides a decoder"),
        (lambda model: model.pop("decoder"), "describes no decoder; wanted model.decoder"),
    ],
)
def test_several_models_in_one_directory_are_refused(change, says, decoder):
    redescribe(decoder, change)
    refused(decoder, "genai_config.json", says, ADVICE, kind=UnsupportedModelError)


@pytest.mark.parametrize(
    ("section", "key", "value", "found"), [("decoder", "hidden_size", 96, 64), (None, "vocab_size", 400, 320)]
)
def test_a_configuration_of_another_model_is_refused(section, key, value, found, decoder):
    redescribe(decoder, lambda model: (model[section] if section else model).update({key: value}))
    refused(decoder, f"says {key} {value}, the graph has {found}; wanted the configuration of this model")


def test_a_model_configuration_of_another_model_is_refused(decoder, checkpoint_of):
    config = json.loads((checkpoint_of("llama") / "config.json").read_text())
    (decoder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    refused(decoder, "config.json says num_hidden_layers 5, the graph has 4")


def test_a_broken_configuration_is_refused(decoder):
    (decoder / "genai_config.json").write_text("{")
    refused(decoder, "genai_config.json is not JSON")


def test_a_checkpoint_wins_over_a_graph_beside_it(decoder, checkpoint_of):
    for file in checkpoint_of("llama").iterdir():
        shutil.copyfile(file, decoder / file.name)
    with open_checkpoint(decoder) as found:
        assert found.source is None


def test_what_is_wanted_names_every_kind_of_model(tmp_path):
    with pytest.raises(ExportError, match=re.escape("or a directory with an ONNX decoder")), open_checkpoint(tmp_path):
        pass


def test_the_shortest_capacity_is_checked_too(decoder, tmp_path):
    bundle = export_bundle(decoder, tmp_path / "b", max_seq_len=2)
    check = json.loads((bundle / "bundle.json").read_text())["check"]
    assert check["positions"] == 2
    assert np.isfinite(check["max_abs_difference"])
