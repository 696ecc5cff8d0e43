"""Everything that a Hugging Face directory holds is used, or named: kind, configuration, files, tensors, values."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.export.sources.checkpoint import open_checkpoint

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def checkpoint(checkpoint_of, tmp_path) -> Path:
    """A copy of an untied Llama that a test may change."""
    return Path(shutil.copytree(checkpoint_of("llama-untied"), tmp_path / "checkpoint"))


def configure(checkpoint: Path, **changes: Any) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def rewrite(checkpoint: Path, change: Callable[[Tensors], object]) -> None:
    file = checkpoint / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def refused(checkpoint: Path, match: str, kind: type[ExportError] = ExportError) -> None:
    with pytest.raises(kind, match=match), open_checkpoint(checkpoint):
        pass


@pytest.mark.parametrize(
    ("described", "method"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"gptq \(4 bits\)"),
        ({"quant_method": "awq", "bits": 4, "version": "gemm"}, "awq"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "fp8", "fmt": "e4m3"}, r"fp8 \(e4m3\)"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, r"compressed-tensors \(pack-quantized\)"),
        ({"something": 1}, "an unnamed method"),
    ],
)
def test_quantised_weights_are_refused_by_their_method(described, method, checkpoint):
    configure(checkpoint, quantization_config=described)
    refused(checkpoint, f"quantised with {method}.*give the checkpoint that was quantised", UnsupportedModelError)


def test_a_quantisers_own_file_counts_too(checkpoint):
    (checkpoint / "quantize_config.json").write_text("{}")
    refused(checkpoint, "quantised with GPTQ", UnsupportedModelError)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8])
def test_weights_that_need_scales_are_refused_though_the_configuration_is_silent(dtype, checkpoint):
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(checkpoint, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    refused(checkpoint, rf"holds {name} as .*whose scales lie elsewhere", UnsupportedModelError)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_in_other_floats_are_read(dtype, checkpoint):
    rewrite(checkpoint, lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items()}))
    with open_checkpoint(checkpoint) as found:
        assert found.model.graph.initializers["model.embed_tokens.weight"].const_value.dtype.name == "FLOAT"


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("LlamaForSequenceClassification", "a classifier or reward model"),
        ("LlamaForTokenClassification", "a classifier of tokens"),
        ("BertForMaskedLM", "an encoder"),
        ("LlamaModel", "without a language-model head"),
        ("InternLM2ForRewardModel", "a reward model"),
        ("LlavaForConditionalGeneration", "an encoder-decoder, or a language model with a vision"),
    ],
)
def test_another_kind_of_model_is_named(architecture, kind, checkpoint):
    configure(checkpoint, architectures=[architecture])
    refused(checkpoint, f"is .*{kind}.*its architecture is {architecture}", UnsupportedModelError)


def test_a_composite_is_named_by_its_parts(checkpoint):
    configure(checkpoint, vision_config={"hidden_size": 8})
    refused(checkpoint, "is a composite with vision_config", UnsupportedModelError)


def test_an_adapter_is_refused_alone_and_beside_its_base(checkpoint, tmp_path):
    described = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "nobody/base"})
    (tmp_path / "adapter").mkdir()
    for directory, where in ((tmp_path / "adapter", "of nobody/base"), (checkpoint, "beside a base model")):
        (directory / "adapter_config.json").write_text(described)
        refused(directory, rf"holds an adapter \(LORA, adapter_config.json\) {where}.*merge it", UnsupportedModelError)


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.q_norm.weight", "model.layers.2.self_attn.q_proj.bias"])
def test_a_tensor_that_the_model_does_not_have_is_named(name, checkpoint):
    rewrite(checkpoint, lambda tensors: tensors.update({name: torch.ones(64)}))
    refused(checkpoint, f"has {name}, which a model of type llama as configured does not have")


def test_a_reward_models_head_is_named_though_its_class_is_that_of_a_language_model(checkpoint):
    def change(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]
        tensors["score.weight"] = torch.ones(1, 64)

    rewrite(checkpoint, change)
    refused(checkpoint, r"lacks weights for lm_head\.weight")


def test_a_head_that_is_not_the_embedding_it_is_said_to_be_is_refused(checkpoint):
    configure(checkpoint, tie_word_embeddings=True)
    refused(checkpoint, "lm_head.weight differs from model.embed_tokens.weight")


def test_a_head_that_repeats_the_embedding_is_one_with_it(checkpoint):
    configure(checkpoint, tie_word_embeddings=True)
    rewrite(checkpoint, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    with open_checkpoint(checkpoint) as found:
        assert "lm_head.weight" not in found.model.graph.initializers


def test_frequencies_that_old_checkpoints_keep_are_no_obstacle(checkpoint):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(checkpoint, lambda tensors: tensors.update({name: torch.ones(8)}))
    with open_checkpoint(checkpoint) as found:
        assert name not in found.model.graph.initializers


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_hidden_layers": 3}, r"has model\.layers\.3\.\S+, .* which a model of type llama as configured"),
        ({"num_hidden_layers": 5}, "has num_hidden_layers 5, and the weights beside it have 4 layers"),
        ({"num_hidden_layers": 10**9}, "has num_hidden_layers 1000000000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0, wanted a number of layers"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers '4', wanted a number of layers"),
        ({"intermediate_size": 256}, "config.json asks for"),
        ({"vocab_size": 10**12}, "config.json asks for"),
        ({"num_attention_heads": 3}, "."),
        ({"num_key_value_heads": 0}, "."),
        ({"hidden_size": -64}, "."),
        ({"hidden_size": "64"}, "transformers cannot read .*config.json"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, "transformers cannot read .*config.json"),
        ({"model_type": 7}, "model_type 7, wanted the name of a model's type"),
        ({"architectures": "LlamaForCausalLM"}, "wanted a list of class names"),
        ({"architectures": 16}, "wanted a list of class names"),
    ],
    ids=str,
)
def test_a_configuration_that_does_not_fit_is_one_message(change, match, checkpoint):
    configure(checkpoint, **change)
    refused(checkpoint, match)


@pytest.mark.parametrize("change", [{"sliding_window": 32}, {"logit_scale": 0.5}, {"partial_rotary_factor_x": 1}])
def test_a_key_that_the_class_does_not_know_is_refused_or_said(change, checkpoint):
    configure(checkpoint, **change)
    (key,) = change
    if key.endswith("_x"):
        with pytest.warns(UserWarning, match=f"does not know {key}"), open_checkpoint(checkpoint):
            pass
    else:
        refused(checkpoint, f"has {key} .*which LlamaConfig of transformers does not know", UnsupportedModelError)


def test_a_key_that_asks_for_nothing_is_passed_over(checkpoint):
    configure(checkpoint, sliding_window=None, logit_scale=1.0, use_qk_norm=False, torch_dtype="bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_checkpoint(checkpoint):
            pass


def test_keys_that_are_left_out_have_their_class_s_defaults(checkpoint_of, tmp_path):
    """A Mistral without `sliding_window` has one of 4096 tokens: its class says so, and so must the graph."""
    directory = Path(shutil.copytree(checkpoint_of("mistral"), tmp_path / "checkpoint"))
    file = directory / "config.json"
    config = json.loads(file.read_text())
    del config["sliding_window"], config["eos_token_id"]
    file.write_text(json.dumps(config))
    with open_checkpoint(directory) as found:
        assert found.config["sliding_window"] == 4096
        assert found.config["eos_token_id"] is None  # the class's is another model's


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_are_found_in_any_tensor(value, checkpoint):
    def damage(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"][34, 3] = value

    rewrite(checkpoint, damage)
    refused(checkpoint, r"1 entries that are NaN or Inf in model\.embed_tokens\.weight \(the first at \[34, 3\]\)")


def shard(checkpoint: Path) -> dict[str, Any]:
    """Split the weights in two files with an index."""
    tensors = load_file(checkpoint / "model.safetensors")
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, checkpoint / file, metadata={"format": "pt"})
    (checkpoint / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def test_a_model_in_shards_is_read(checkpoint, checkpoint_of):
    shard(checkpoint)
    with open_checkpoint(checkpoint) as found, open_checkpoint(checkpoint_of("llama-untied")) as wanted:
        assert found.identity == wanted.identity


def test_shards_that_do_not_fit_their_index_are_refused(checkpoint):
    index = shard(checkpoint)
    file = checkpoint / "model.safetensors.index.json"
    name = next(iter(index["weight_map"]))
    faults = {
        "places .* wanted the name of a file beside it": {**index["weight_map"], name: "../elsewhere.safetensors"},
        "disagree on": {**index["weight_map"], "model.layers.9.mlp.up_proj.weight": index["weight_map"][name]},
        "lacks model-00003-of-00003": {**index["weight_map"], name: "model-00003-of-00003.safetensors"},
        "has no weight_map of names": {name: 1},
    }
    for match, places in faults.items():
        file.write_text(json.dumps({**index, "weight_map": places}))
        refused(checkpoint, match)
    file.write_text(json.dumps({"weight_map": index["weight_map"]}))
    refused(checkpoint, "has no metadata object")
    file.unlink()
    refused(checkpoint, r"has model-00001-of-00002\.safetensors and no model\.safetensors\.index\.json")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"x": ' + "9" * 5000 + "}", "\xff"], ids=["deep", "digits", "latin"])
def test_a_configuration_that_python_cannot_read_is_one_message(text, checkpoint):
    (checkpoint / "config.json").write_text(text, encoding="latin-1")
    refused(checkpoint, "config.json is not JSON")
