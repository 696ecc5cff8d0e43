"""Small Hugging Face checkpoints as GGUF files, written as llama.cpp's converter writes them, and with faults."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file

CONTROL, NORMAL = 3, 1
#: model_type -> (architecture, rows of query and key are permuted, what norms have more).
_ARCHITECTURES = {
    "llama": ("llama", True, 0.0),
    "qwen2": ("qwen2", False, 0.0),
    "qwen3": ("qwen3", False, 0.0),
    "gemma2": ("gemma2", False, 1.0),
    "gemma3_text": ("gemma3", False, 1.0),
    "phi3": ("phi3", False, 0.0),
    "granite": ("granite", True, 0.0),
    "smollm3": ("smollm3", True, 0.0),
}
_NUMBERS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.sliding_window": "sliding_window",
}
_FLOATS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def write_gguf(
    checkpoint: Path,
    path: Path,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    split: int = 0,
    drop: Collection[str] = (),
    extra: Mapping[str, Any] = {},
    tensors: Mapping[str, np.ndarray] = {},
    change: Callable[[str, np.ndarray], np.ndarray] = lambda _, values: values,
    pre: str | None = "gpt-2",
    template: str | None = None,
) -> list[Path]:
    """Write the Hugging Face directory `checkpoint` as the GGUF file `path`; its parts where it is `split`.

    Args:
        kind: of every matrix; norms and biases stay float32.
        split: tensors of a part.
        drop: tensors and keys to leave out, by their names in the file.
        extra: keys to add or to replace.
        tensors: to add.
        change: what is written of a tensor.
        pre: the pre-tokenizer's name.
    """
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    name, permuted, offset = _ARCHITECTURES[config.model_type]
    keys = {**_keys(config, name), **_tokenizer(checkpoint, pre, template), **extra}
    # The writer adds this key itself.
    architecture = keys.pop("general.architecture", name)
    writer = gguf.GGUFWriter(str(path), architecture, split_max_tensors=split)
    for key, value in keys.items():
        if key not in drop and value is not None:
            _put(writer, key, value)
    known = next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    table = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    for stored, tensor in load_file(checkpoint / "model.safetensors").items():
        stem, _, suffix = stored.rpartition(".")
        place = f"{table.get_name(stem)}.{suffix}"
        values = tensor.to(torch.float32).numpy()
        if permuted and ".attn_q." in place:
            values = _permute(values, config.num_attention_heads)
        if permuted and ".attn_k." in place:
            values = _permute(values, config.num_key_value_heads)
        found[place] = values + np.float32(offset) if "norm" in place else values
    for place, values in {**found, **tensors}.items():
        if place in drop:
            continue
        stored_kind = kind if values.ndim == 2 and place not in tensors else gguf.GGMLQuantizationType.F32
        changed = np.ascontiguousarray(change(place, values.astype(np.float32)))
        if stored_kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(place, changed)
        else:
            writer.add_tensor(place, gguf.quants.quantize(changed, stored_kind), raw_dtype=stored_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}-*.gguf")) if split else [path]


def _keys(config: Any, name: str) -> dict[str, Any]:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    facts = {"attention.key_length": size, "attention.value_length": size, "rope.dimension_count": size}
    for key, own in {**_NUMBERS, **_FLOATS}.items():
        value = getattr(config, own, None)
        if value is not None and not (own == "sliding_window" and config.model_type.startswith("qwen")):
            facts[key] = float(value) if key in _FLOATS else int(value)
    facts["rope.freq_base"] = float(rope["rope_theta"])
    facts["vocab_size"] = config.vocab_size
    return {f"{name}.{key}": value for key, value in facts.items()}


def _tokenizer(checkpoint: Path, pre: str | None, template: str | None) -> dict[str, Any]:
    described = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    told = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
    ids = dict(described["model"]["vocab"])
    special = {token["content"]: token["id"] for token in described["added_tokens"]}
    ids.update(special)
    names = sorted(ids, key=lambda token: ids[token])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"]]
    template = template or told.get("chat_template")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [CONTROL if token in special else NORMAL for token in names],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": ids.get(told.get("eos_token", "")),
        "tokenizer.ggml.bos_token_id": ids.get(told.get("bos_token", "")),
        "tokenizer.chat_template": template,
    }


def _put(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def _permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs half a head apart to interleaved pairs, as llama.cpp's converter does."""
    shape = (heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)
