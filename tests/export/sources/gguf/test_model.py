"""A GGUF file gives the model it was made from, and one of which something would be left out is refused by name."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import transformers

from tests.support.gguf_files import write_gguf
from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.export.passes.lower import lower
from via_sd.export.sources.checkpoint import open_checkpoint
from via_sd.export.sources.gguf.file import open_gguf
from via_sd.export.sources.gguf.model import gguf_to_directory, open_gguf_model

#: Reads past the window of 32 tokens.
LENGTH = 100
FAMILIES = ["llama", "llama-untied", "qwen2", "qwen3", "granite", "phi3", "phi3-window", "smollm3", "gemma2", "gemma3"]
#: Chosen so that every rotary pair is scaled otherwise.
DIVISORS = np.array([1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0], np.float32)


def logits(source, workshop, tokens) -> np.ndarray:
    with open_checkpoint(source) as checkpoint:
        lower(checkpoint.model, checkpoint.config, 128)
        return workshop.open(checkpoint.model, source.name.replace(".", "-")).feed_in([90, 9, 1], tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_the_same_from_gguf_and_from_its_checkpoint(
    family, gguf_checkpoint, tmp_path, workshop, random_tokens
):
    """Beyond windows too: rows of query and key, norms, windows, scales and soft caps come through the file's keys."""
    checkpoint = gguf_checkpoint(family)
    write_gguf(checkpoint, tmp_path / "model.gguf")
    tokens = random_tokens(LENGTH)
    found, wanted = (logits(source, workshop, tokens) for source in (tmp_path / "model.gguf", checkpoint))
    assert np.abs(found - wanted).max() < 1e-4 * max(1.0, np.abs(wanted).max())


@pytest.mark.parametrize(
    ("keys", "tensors", "rope"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {"llama.rope.scaling.factor": 4.0},  # without a type it is linear
            {},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scale_linear": 2.0}, {}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            {},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            {},
            {"rope_freqs.weight": DIVISORS},
            {
                "rope_type": "longrope",
                "short_factor": DIVISORS.tolist(),
                "long_factor": DIVISORS.tolist(),
                "factor": 1.0,
                "attention_factor": 1.0,
                "original_max_position_embeddings": 256,
            },
        ),
    ],
    ids=["linear", "linear unnamed", "linear by its old key", "yarn", "divisors"],
)
def test_scaled_rotary_positions_are_those_of_transformers(
    keys, tensors, rope, gguf_checkpoint, tmp_path, random_tokens
):
    checkpoint = gguf_checkpoint("llama")
    write_gguf(checkpoint, tmp_path / "model.gguf", extra=keys, tensors=tensors)
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    config.rope_parameters = {"rope_theta": 10000.0, **rope}
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, config=config)
    tokens = torch.tensor([random_tokens(LENGTH)])
    with open_checkpoint(tmp_path / "model.gguf") as read:
        assert read.reference is not None
        with torch.no_grad():
            found, wanted = read.reference()(tokens).logits, model(tokens).logits
    assert torch.allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_split_model_is_read_whole_from_any_of_its_parts(part, gguf_checkpoint, tmp_path):
    checkpoint = gguf_checkpoint("llama")
    parts = write_gguf(checkpoint, tmp_path / "model.gguf", split=16)
    assert len(parts) == 3
    write_gguf(checkpoint, tmp_path / "whole.gguf")
    whole = open_gguf(tmp_path / "whole.gguf")
    found = open_gguf(parts[part])
    assert found.tensors.keys() == whole.tensors.keys()
    assert all(np.array_equal(found.tensors[name].values(), whole.tensors[name].values()) for name in whole.tensors)


def test_a_split_model_without_all_its_parts_is_refused(gguf_checkpoint, tmp_path):
    parts = write_gguf(gguf_checkpoint("llama"), tmp_path / "model.gguf", split=16)
    parts[1].unlink()
    with pytest.raises(
        ExportError, match=r"one of 3 parts of a split model, and model-00002-of-00003\.gguf is missing"
    ):
        open_gguf(parts[0])
    renamed = parts[0].rename(tmp_path / "first.gguf")
    with pytest.raises(ExportError, match="is one of 3 parts of a split model; wanted all of them"):
        open_gguf(renamed)


@pytest.mark.parametrize(
    "dropped", ["token_embd.weight", "output_norm.weight", "blk.2.attn_norm.weight", "blk.3.ffn_up.weight"]
)
def test_a_missing_tensor_is_named(dropped, gguf_checkpoint, tmp_path):
    write_gguf(gguf_checkpoint("llama"), tmp_path / "model.gguf", drop=[dropped])
    with pytest.raises(ExportError, match=f"lacks weights for {dropped}"), open_checkpoint(tmp_path / "model.gguf"):
        pass


@pytest.mark.parametrize("name", ["blk.1.attn_q.bias", "blk.0.attn_q_norm.weight", "blk.0.attn_sinks.weight"])
def test_a_surplus_tensor_is_named(name, gguf_checkpoint, tmp_path):
    write_gguf(gguf_checkpoint("llama"), tmp_path / "model.gguf", tensors={name: np.ones(64, np.float32)})
    with (
        pytest.raises(ExportError, match=f"has {name}, which a model of type llama as configured does not have"),
        open_checkpoint(tmp_path / "model.gguf"),
    ):
        pass


@pytest.mark.parametrize(
    "key",
    [
        "attention.sliding_window",
        "attention.scale",
        "logit_scale",
        "expert_count",
        "attention.key_length_mla",
        "something.new",
    ],
)
def test_a_key_that_would_be_left_out_is_named(key, gguf_checkpoint, tmp_path):
    value = 0.3 if "scale" in key else 8
    write_gguf(gguf_checkpoint("llama"), tmp_path / "model.gguf", extra={f"llama.{key}": value})
    with pytest.raises(UnsupportedModelError, match=rf"asks for llama\.{key} .*does not have"):
        open_gguf_model(tmp_path / "model.gguf", tmp_path / "directory")


def test_a_key_that_asks_for_nothing_is_no_obstacle(gguf_checkpoint, tmp_path):
    extra = {"llama.attention.sliding_window": 4096, "llama.logit_scale": 1.0, "llama.attention.scale": 0.25}
    write_gguf(gguf_checkpoint("llama"), tmp_path / "model.gguf", extra=extra)
    open_gguf_model(tmp_path / "model.gguf", tmp_path / "directory")


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"llama.block_count": 3}, "says 3 layers .*its tensors are of 4"),
        ({"llama.block_count": 5}, "says 5 layers .*its tensors are of 4"),
        ({"llama.block_count": 2**31}, "says 2147483648 layers"),
        ({"llama.vocab_size": 500}, "says vocab_size 500, and its embedding has 320 rows"),
        ({"llama.attention.head_count": 0}, "attention without heads"),
        ({"llama.feed_forward_length": 256}, r"ffn_\w+.weight of shape .* and its keys ask for"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 of 16 numbers of a head"),
        ({"llama.attention.value_length": 32}, "keys of 16 and values of 32 numbers"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "rope.scaling.type longrope"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": -1.0}, "wanted a factor above 0"),
        ({"llama.embedding_length": "64"}, "embedding_length 64, wanted one number for all layers"),
        ({"llama.attention.head_count_kv": [2, 2, 1, 2]}, "head_count_kv .*wanted one number for all layers"),
        ({"llama.rope.freq_base": float("nan")}, "."),
    ],
)
def test_keys_that_do_not_fit_are_named(extra, match, gguf_checkpoint, tmp_path):
    write_gguf(gguf_checkpoint("llama"), tmp_path / "model.gguf", extra=extra)
    with pytest.raises(ExportError, match=match), open_checkpoint(tmp_path / "model.gguf"):
        pass


@pytest.mark.parametrize("dropped", ["context_length", "embedding_length", "block_count", "attention.head_count"])
def test_a_missing_key_is_named(dropped, gguf_checkpoint, tmp_path):
    write_gguf(gguf_checkpoint("llama"), tmp_path / "model.gguf", drop=[f"llama.{dropped}"])
    with pytest.raises(ExportError, match=rf"has no llama\.{dropped}"):
        open_gguf_model(tmp_path / "model.gguf", tmp_path / "directory")


def test_what_is_no_language_model_is_named(gguf_checkpoint, tmp_path):
    ones = np.ones((4, 64), np.float32)
    kinds = {
        "LoRA adapter": {"extra": {"general.type": "adapter", "adapter.type": "lora"}},
        "importance matrix": {"extra": {"general.type": "imatrix"}},
        "of type mmproj": {"extra": {"general.type": "mmproj"}},
        r"LoRA adapter \(": {"tensors": {"blk.0.attn_q.weight.lora_a": ones}},
        "importance matrix .imatrix": {"tensors": {"blk.0.attn_q.weight.in_sum2": ones}},
        "an image or audio projector": {"extra": {"general.architecture": "clip"}},
        "an encoder": {"extra": {"general.architecture": "bert"}},
        "an embedding model or an encoder": {"extra": {"llama.pooling_type": 1}},
        "a classifier, reward model or reranker": {"tensors": {"cls.output.weight": ones}},
        "names no architecture": {"extra": {"general.architecture": ""}},
        "of architecture mamba, wanted one of llama": {"extra": {"general.architecture": "mamba"}},
    }
    for number, (match, arguments) in enumerate(kinds.items()):
        path = tmp_path / f"{number}.gguf"
        write_gguf(gguf_checkpoint("llama"), path, **arguments)
        with pytest.raises(UnsupportedModelError, match=match):
            open_gguf_model(path, tmp_path / "directory")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_are_found_in_any_tensor(value, gguf_checkpoint, tmp_path):
    def damage(name: str, values: np.ndarray) -> np.ndarray:
        if name == "blk.2.ffn_gate.weight":
            values = values.copy()
            values[3, 5] = value
        return values

    write_gguf(gguf_checkpoint("llama"), tmp_path / "model.gguf", change=damage)
    match = r"1 entries that are NaN or Inf in blk\.2\.ffn_gate\.weight \(the first at \[3, 5\]\)"
    with pytest.raises(ExportError, match=match), open_checkpoint(tmp_path / "model.gguf"):
        pass


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q5_1", "Q8_0"])
def test_values_are_those_of_another_reader(kind, gguf_checkpoint, tmp_path):
    """The reader of the `gguf` package reads the file anew: where tensors lie, how they are stored, what they hold."""
    checkpoint = gguf_checkpoint("qwen2")
    write_gguf(checkpoint, tmp_path / "model.gguf", kind=gguf.GGMLQuantizationType[kind])
    gguf_to_directory(tmp_path / "model.gguf", tmp_path / "directory")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "directory", dtype=torch.float32)
    found = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, model.config.num_hidden_layers)
    read = gguf.GGUFReader(tmp_path / "model.gguf")
    places = {f"{table.get_name(name.rpartition('.')[0])}.{name.rpartition('.')[2]}": name for name in found}
    assert {tensor.name for tensor in read.tensors} == places.keys() - {"output.weight"}
    for tensor in read.tensors:
        wanted = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(found[places[tensor.name]].shape)
        assert np.array_equal(found[places[tensor.name]], wanted), tensor.name
