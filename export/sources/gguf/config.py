"""The configuration a GGUF file's keys make: every key is used, known to say nothing of the model, or refused by name.

What the file leaves out has the value that llama.cpp gives it, since that is what such files are made for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.export.sources.gguf.families import (
    COMMON_KEYS,
    FAMILIES,
    INTERPRETED_KEYS,
    IRRELEVANT_KEYS,
    OTHER_KINDS,
    Family,
)
from via_sd.export.sources.gguf.file import GgufFile

#: Groups of keys that are not about the model's numbers; those of the tokenizer are read with it.
_OTHER_GROUPS = ("general.", "tokenizer.", "split.", "quantize.")
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_ADVICE = "use another file of this model, or its original checkpoint"
#: Layers of the models whose query scale is that of hidden size over heads, not of the head (llama.cpp does as much).
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_GEMMA3_PATTERN, _GEMMA3_LOCAL_THETA = 6, 10000.0
_SMOLLM3_NO_ROPE = 4


def check_model(file: GgufFile) -> Family:
    """How to read `file`, once it is found to hold a language model.

    Raises:
        UnsupportedModelError: an adapter, a projector, an importance matrix, an encoder, a classifier, or an
            architecture that is not read here.
    """
    kind = file.keys.get("general.type", "model")
    wanted = "wanted the GGUF file of a language model"
    names = list(file.tensors)
    if kind == "adapter" or any(name.endswith((".lora_a", ".lora_b")) for name in names):
        raise UnsupportedModelError(
            f"{file.path} is a LoRA adapter (general.type {kind}); {wanted}: merge the adapter into its base first"
        )
    if kind == "imatrix" or any(name.endswith((".in_sum2", ".counts")) for name in names):
        raise UnsupportedModelError(
            f"{file.path} is an importance matrix (imatrix), which guides a quantiser; {wanted}"
        )
    if kind != "model":
        raise UnsupportedModelError(f"{file.path} is of type {kind} (general.type); {wanted}")
    architecture = file.architecture
    if architecture in OTHER_KINDS:
        raise UnsupportedModelError(f"{file.path} is {OTHER_KINDS[architecture]} ({architecture}); {wanted}")
    if file.key("pooling_type") or file.key("attention.causal") is False:
        raise UnsupportedModelError(f"{file.path} is an embedding model or an encoder ({architecture}); {wanted}")
    if any(name.startswith("cls.") for name in names) or file.key("classifier.output_labels"):
        raise UnsupportedModelError(f"{file.path} is a classifier, reward model or reranker ({architecture}); {wanted}")
    if architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"{file.path} is of architecture {architecture}, wanted one of {', '.join(FAMILIES)}; give the model's "
            "Hugging Face checkpoint"
        )
    return FAMILIES[architecture]


def config_of(file: GgufFile, family: Family) -> dict[str, Any]:
    """The model's configuration in the words of transformers.

    Raises:
        ExportError: keys that are missing, or do not fit each other or the tensors.
        UnsupportedModelError: keys that ask for what the family does not have.
    """
    keys = {**COMMON_KEYS, **family.keys}
    _check_keys(file, set(keys) | INTERPRETED_KEYS | IRRELEVANT_KEYS)
    config: dict[str, Any] = {"model_type": family.model_type, **family.defaults}
    for key, name in keys.items():
        value = file.key(key)
        if value is not None:
            config[name] = _number(file, key, value)
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    required = {name: key for key, name in COMMON_KEYS.items()}
    if missing := [required[name] for name in required if config.get(name) is None]:
        raise ExportError(f"{file.path} has no {file.architecture}.{missing[0]}; it is incomplete: fetch it again")
    _set_sizes(file, family, config)
    layers = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if len(layers) != config["num_hidden_layers"]:
        raise ExportError(
            f"{file.path} says {config['num_hidden_layers']} layers (block_count), and its tensors are of "
            f"{len(layers)}; it is incomplete: fetch it again"
        )
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    for tensor, name in family.biases.items():
        config[name] = f"blk.0.{tensor}" in file.tensors
    config["rope_parameters"] = _rope(file, family, config)
    _set_attention(file, family, config)
    return config


def notes_of(file: GgufFile) -> tuple[str, ...]:
    """Keys that are neither of the architecture nor of a group that is known to say nothing of the model."""
    known = (f"{file.architecture}.", *_OTHER_GROUPS)
    if other := sorted(key for key in file.keys if not key.startswith(known)):
        return (f"{file.path.name}: not read: {', '.join(other[:8])}",)
    return ()


def _check_keys(file: GgufFile, known: set[str]) -> None:
    prefix = f"{file.architecture}."
    unknown = [
        f"{key} {str(value)[:40]}"
        for key, value in file.keys.items()
        if key.startswith(prefix)
        and (name := key.removeprefix(prefix)) not in known
        and not _neutral(file, name, value)
    ]
    if unknown:
        raise UnsupportedModelError(
            f"{file.path} asks for {', '.join(unknown[:4])}, which {file.architecture} as it is read here does not "
            f"have; {_ADVICE}"
        )


def _neutral(file: GgufFile, name: str, value: Any) -> bool:
    """Whether a key that a family does not have asks for nothing."""
    if name == "attention.sliding_window":
        return value == 0 or (isinstance(value, int) and value >= int(file.key("context_length") or 0))
    if name == "attention.scale":
        head = file.key("attention.key_length") or file.key("rope.dimension_count")
        return isinstance(value, float) and bool(head) and math.isclose(value, 1 / math.sqrt(head), rel_tol=1e-5)
    if name in ("logit_scale", "residual_scale", "embedding_scale"):
        return value in (0.0, 1.0)
    return name.endswith(("expert_count", "expert_used_count", "logit_softcapping")) and not value


def _number(file: GgufFile, key: str, value: Any) -> int | float:
    if isinstance(value, list) and value and all(entry == value[0] for entry in value):
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise UnsupportedModelError(
            f"{file.path} has {file.architecture}.{key} {str(value)[:60]}, wanted one number for all layers; {_ADVICE}"
        )
    return value


def _set_sizes(file: GgufFile, family: Family, config: dict[str, Any]) -> None:
    """Size of a head and of the vocabulary, held against the tensors."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ExportError(f"{file.path} lacks weights for token_embd.weight; it is incomplete: fetch it again")
    config["vocab_size"] = embedding.shape[0]
    said = file.key("vocab_size")
    if said is not None and said != embedding.shape[0]:
        raise ExportError(f"{file.path} says vocab_size {said}, and its embedding has {embedding.shape[0]} rows")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if not heads or not config["num_key_value_heads"]:
        raise ExportError(f"{file.path} has attention without heads ({heads}, {config['num_key_value_heads']})")
    by_key, by_value = file.key("attention.key_length"), file.key("attention.value_length")
    rotary = file.key("rope.dimension_count")
    size = by_key or by_value or (rotary if family.own_head_dim else None) or hidden // heads
    if any(found not in (None, size) for found in (by_key, by_value)):
        raise UnsupportedModelError(
            f"{file.path} has keys of {by_key} and values of {by_value} numbers; wanted the same"
        )
    if family.own_head_dim:
        config["head_dim"] = size
    elif size * heads != hidden:
        raise UnsupportedModelError(f"{file.path} has {heads} heads of {size}, wanted {hidden} numbers in all")
    if rotary not in (None, size):
        if not family.rotary_part:
            raise UnsupportedModelError(
                f"{file.path} rotates {rotary} of {size} numbers of a head (rope.dimension_count), which "
                f"{file.architecture} as it is read here does not have; {_ADVICE}"
            )
        config["partial_rotary_factor"] = rotary / size


def _rope(file: GgufFile, family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    theta = float(file.key("rope.freq_base") or 10000.0)
    scaled = {**_scaling(file, config), "rope_theta": theta}
    if "partial_rotary_factor" in config:
        scaled["partial_rotary_factor"] = config["partial_rotary_factor"]
    if family.model_type != "gemma3_text":
        return scaled
    local = {"rope_type": "default", "rope_theta": _GEMMA3_LOCAL_THETA}
    return {"full_attention": scaled, "sliding_attention": local}


def _scaling(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """How rotary frequencies are scaled: a named kind, or a factor for each frequency in a tensor of its own."""
    factor = float(file.key("rope.scaling.factor") or 0.0)
    kind = file.key("rope.scaling.type") or ("linear" if factor else "none")
    context = int(config["max_position_embeddings"])
    original = int(file.key("rope.scaling.original_context_length") or context)
    if file.key("rope.scale_linear") not in (None, 0, 1):
        kind, factor = "linear", float(file.key("rope.scale_linear"))
    factors = [name for name in _ROPE_FACTORS if name in file.tensors]
    if factors and (factors[0] != _ROPE_FACTORS[0] or kind not in ("none", "linear") or factor not in (0.0, 1.0)):
        raise UnsupportedModelError(
            f"{file.path} scales rotary positions by {', '.join(factors)} and {kind} {factor:g}; wanted one scaling; "
            f"{_ADVICE}"
        )
    if factors:
        divisors = [float(value) for value in file.tensors[factors[0]].values().ravel()]
        # The kind of transformers that takes a divisor for each frequency; the same for short and for long texts.
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return {"rope_type": "default"}
    attention = file.key("rope.scaling.attn_factor") or file.key("rope.scaling.yarn_attn_factor") or 1.0
    if factor <= 0.0 or not math.isclose(attention, 1.0):
        raise UnsupportedModelError(
            f"{file.path} has rope.scaling.type {kind} with factor {factor:g} and attn_factor {attention:g}; wanted a "
            f"factor above 0 and no attn_factor; {_ADVICE}"
        )
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": float(file.key("rope.scaling.yarn_beta_fast") or 32.0),
            "beta_slow": float(file.key("rope.scaling.yarn_beta_slow") or 1.0),
        }
    raise UnsupportedModelError(f"{file.path} has rope.scaling.type {kind}, wanted none, linear or yarn; {_ADVICE}")


def _set_attention(file: GgufFile, family: Family, config: dict[str, Any]) -> None:
    """What llama.cpp knows of a family and no key says."""
    layers, model_type = config["num_hidden_layers"], family.model_type
    if model_type in ("gemma2", "gemma3_text"):
        architecture = file.architecture
        wide = layers == _GEMMA_27B_LAYERS[architecture]
        config["query_pre_attn_scalar"] = (
            config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
        )
        if not config.get("sliding_window"):
            raise ExportError(f"{file.path} has no {architecture}.attention.sliding_window; fetch it again")
        every = 2 if model_type == "gemma2" else _GEMMA3_PATTERN
        config["layer_types"] = [
            "full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(layers)
        ]
        if model_type == "gemma2":
            config.setdefault("attn_logit_softcapping", 50.0)
            config.setdefault("final_logit_softcapping", 30.0)
    elif model_type == "smollm3":
        config["no_rope_layers"] = [int((layer + 1) % _SMOLLM3_NO_ROPE != 0) for layer in range(layers)]
    elif model_type == "phi3":
        config["original_max_position_embeddings"] = config["max_position_embeddings"]
        config["sliding_window"] = config.get("sliding_window") or None
