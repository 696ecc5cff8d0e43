"""Architectures of GGUF files that are read: what each key and tensor of theirs is called in transformers.

Every key of a file is looked for here. One that is in none of the tables would change the model, for all this release
knows, so `config.py` refuses it by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: Keys below the architecture's name -> key of a configuration, the same in every family.
COMMON_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
#: Keys that `config.py` gives a meaning of its own.
INTERPRETED_KEYS = {
    "vocab_size",
    "attention.key_length",
    "attention.value_length",
    "attention.causal",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
#: Keys that say nothing of what the model computes.
IRRELEVANT_KEYS = {"rope.scaling.finetuned", "tensor_data_layout", "attention.layer_norm_epsilon"}


@dataclass(frozen=True)
class Family:
    """How files of one architecture are read.

    Attributes:
        model_type: of the configuration in transformers.
        keys: keys of its own -> key of the configuration.
        permuted: rows of the query and key projections are stored in the order of interleaved rotary pairs.
        norm_offset: what the file's norm weights have more than those of transformers.
        biases: tensors (without layer) that all layers may have -> the key of the configuration that says so.
        defaults: what the configuration says that no key does.
        own_head_dim: the configuration has a key for the size of a head.
        rotary_part: rotary embeddings may cover a part of each head.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    norm_offset: float = 0.0
    biases: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    own_head_dim: bool = True
    rotary_part: bool = False


_WINDOW = {"attention.sliding_window": "sliding_window"}
_LLAMA_BIASES = {"attn_output.bias": "attention_bias", "ffn_down.bias": "mlp_bias"}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", permuted=True, biases=_LLAMA_BIASES),
    "qwen2": Family("qwen2", own_head_dim=False, defaults={"use_sliding_window": False}),
    "qwen3": Family("qwen3", defaults={"use_sliding_window": False}),
    "gemma2": Family(
        "gemma2",
        keys={
            **_WINDOW,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        norm_offset=1.0,
        defaults=_GEMMA,
    ),
    "gemma3": Family(
        "gemma3_text",
        keys={**_WINDOW, "final_logit_softcapping": "final_logit_softcapping"},
        norm_offset=1.0,
        defaults=_GEMMA,
    ),
    "phi3": Family("phi3", keys=_WINDOW, own_head_dim=False, rotary_part=True),
    "granite": Family(
        "granite",
        keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        permuted=True,
        biases=_LLAMA_BIASES,
        own_head_dim=False,
    ),
    "smollm3": Family("smollm3", permuted=True, own_head_dim=False),
}

#: Architectures that are no decoders of text alone, by what they are.
OTHER_KINDS = {
    "clip": "an image or audio projector (mmproj)",
    "bert": "an encoder",
    "nomic-bert": "an encoder",
    "nomic-bert-moe": "an encoder",
    "jina-bert-v2": "an encoder",
    "neo-bert": "an encoder",
    "modern-bert": "an encoder",
    "t5": "an encoder-decoder",
    "t5encoder": "an encoder",
    "gemma-embedding": "an encoder",
    "wavtokenizer-dec": "an audio decoder",
    "dream": "a diffusion language model",
    "llada": "a diffusion language model",
}
