"""`config.json`: read within limits, completed by its class's defaults, and held against what the weight files have.

A key that the model's class does not know changes nothing in transformers. Where such a key would change the model
were it known (a window, a scale), it is refused by name rather than ignored; others become notes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.export.failures import one_message
from via_sd.files import read_json_object

CONFIG_FILE = "config.json"
#: Keys by which families change what a layer computes; in a class that does not know them they would be ignored.
_SEMANTIC = {
    "alibi",
    "attention_bias",
    "attention_in_multiplier",
    "attention_multiplier",
    "attention_out_multiplier",
    "attn_logit_softcapping",
    "clip_qkv",
    "embedding_multiplier",
    "final_logit_softcapping",
    "global_rope_theta",
    "key_multiplier",
    "layer_types",
    "lm_head_multiplier",
    "local_rope_theta",
    "logit_scale",
    "logits_scaling",
    "mlp_bias",
    "mlp_multipliers",
    "no_rope_layers",
    "num_experts",
    "num_local_experts",
    "parallel_attn",
    "partial_rotary_factor",
    "qk_layernorm",
    "qkv_bias",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "rope_local_base_freq",
    "rotary_pct",
    "scale_attn_by_inverse_layer_idx",
    "scale_emb",
    "scale_depth",
    "sliding_window",
    "use_parallel_residual",
    "use_qk_norm",
    "use_qkv_bias",
}
#: What transformers accepts under an older name, or reads without a field of its own, and what says nothing of numbers.
_KNOWN = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "_sliding_window_pattern",
    "attn_implementation",
    "auto_map",
    "cache_implementation",
    "custom_pipelines",
    "head_dim",
    "max_window_layers",
    "model_type",
    "num_labels",
    "output_attentions",
    "pad_token",
    "rope_scaling",
    "rope_theta",
    "rotary_emb_base",
    "sliding_window_pattern",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
}
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_LAYER_INDEX = re.compile(r"\.(?:layers|h|blocks|layer)\.(\d+)\.")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A configuration as transformers understands it.

    Attributes:
        transformers: its configuration object.
        resolved: the same as a mapping, with the defaults of its class.
        notes: what of the file says nothing to that class.
    """

    transformers: Any
    resolved: dict[str, Any]
    notes: tuple[str, ...]


def read_raw_config(directory: Path) -> dict[str, Any]:
    """The contents of the directory's `config.json`."""
    return read_json_object(directory / CONFIG_FILE, ExportError)


def resolve_config(directory: Path, raw: Mapping[str, Any], tensors: Iterable[str]) -> ModelConfig:
    """The configuration in `directory`, whose contents are `raw`, of a model whose weights are called `tensors`.

    Raises:
        ExportError: values that make no sense, or more layers than the weights have.
        UnsupportedModelError: a class that transformers does not have, or a key it would ignore and must not.
    """
    file = directory / CONFIG_FILE
    names = list(tensors)
    _check_layers(file, raw, names)
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise ExportError(f"{file} has model_type {kind!r}, wanted the name of a model's type")
    from transformers import AutoConfig

    with one_message(f"transformers cannot read {file}", UnsupportedModelError):
        config = AutoConfig.from_pretrained(directory)
        resolved = config.to_dict()
    return ModelConfig(config, resolved, _unknown_keys(file, raw, type(config), resolved))


def _check_layers(file: Path, raw: Mapping[str, Any], names: list[str]) -> None:
    """Layers are built one by one: their number is held against the file before anything is built."""
    stored = 1 + max((int(number) for name in names for number in _LAYER_INDEX.findall(f".{name}")), default=-1)
    for key in _LAYER_COUNTS:
        count = raw.get(key)
        if count is None:
            continue
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ExportError(f"{file} has {key} {count!r}, wanted a number of layers")
        if names and count > stored:
            raise ExportError(f"{file} has {key} {count}, and the weights beside it have {stored} layers")


def _unknown_keys(file: Path, raw: Mapping[str, Any], kind: type, resolved: Mapping[str, Any]) -> tuple[str, ...]:
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set(resolved)
    names: Mapping[str, str] = getattr(kind, "attribute_map", {})  # of a field and what it is written as, or read
    known = fields | names.keys() | set(names.values()) | _KNOWN
    unknown = {
        key: value
        for key, value in raw.items()
        if key not in known and not key.startswith(("_", "transformers.js")) and _says_something(key, value, raw)
    }
    ignored = sorted(unknown.keys() & _SEMANTIC)
    if ignored:
        raise UnsupportedModelError(
            f"{file} has {', '.join(f'{key} {str(unknown[key])[:40]}' for key in ignored)}, which {kind.__name__} of "
            "transformers does not know, so that it would be ignored; set the model_type that has it, or take it out"
        )
    if not unknown:
        return ()
    return (f"{file.name}: {kind.__name__} does not know {', '.join(sorted(unknown))}",)


def _says_something(key: str, value: Any, raw: Mapping[str, Any]) -> bool:
    """Whether a key's value differs from its absence."""
    if value in (None, False, "", [], {}):
        return False
    if key == "sliding_window":
        limit = raw.get("max_position_embeddings")
        return not (isinstance(limit, int) and isinstance(value, int) and value >= limit)
    if key.endswith(("multiplier", "scale", "scaling", "factor", "pct")):
        return bool(value != 1)
    if key == "layer_types":
        return isinstance(value, list) and any(entry != "full_attention" for entry in value)
    return True
