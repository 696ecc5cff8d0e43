"""Rotary frequencies as llama.cpp computes them from a file's keys, held against those of the configuration made of it.

Two ways from the same keys: a key that is read wrong, or that transformers understands otherwise, shows here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from via_sd.errors import ExportError
from via_sd.export.failures import one_message
from via_sd.export.sources.gguf.file import GgufFile

_TOLERANCE = 1e-5


def check_rope(file: GgufFile, config: Any) -> None:
    """Compare rotary frequencies and their magnitude: by the keys of `file`, and by `config` in transformers.

    Raises:
        ExportError: they differ.
    """
    from transformers import AutoModelForCausalLM

    models: Any = AutoModelForCausalLM
    with one_message(f"transformers cannot build the rotary embedding of {file.path}"):
        one: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8, "pad_token_id": None}
        if getattr(config, "layer_types", None):
            one["layer_types"] = ["full_attention"]
        small = type(config).from_dict({**config.to_dict(), **one})
        rotary = models.from_config(small).model.rotary_emb
        prefix = "full_attention_" if hasattr(rotary, "full_attention_inv_freq") else ""
        found = getattr(rotary, f"{prefix}inv_freq").float().numpy()
        magnitude = float(getattr(rotary, f"{prefix}attention_scaling"))
    wanted, scale = rotary_frequencies(file, 2 * len(found))
    if found.shape != wanted.shape or not np.allclose(found, wanted, rtol=_TOLERANCE, atol=0):
        worst = int(np.abs(found / wanted - 1).argmax()) if found.shape == wanted.shape else 0
        raise ExportError(
            f"{file.path}: rotary frequency {worst} is {found[worst]:.6g} as transformers understands the file's keys, "
            f"and {wanted[worst]:.6g} as llama.cpp does; please report it"
        )
    if not math.isclose(magnitude, scale, rel_tol=_TOLERANCE):
        raise ExportError(
            f"{file.path}: rotary embeddings are scaled by {magnitude:.6g} as transformers understands the file's "
            f"keys, and by {scale:.6g} as llama.cpp does; please report it"
        )


def rotary_frequencies(file: GgufFile, size: int) -> tuple[np.ndarray, float]:
    """Angle for each position of each of `size` / 2 pairs, float64, and the magnitude of the rotated vectors.

    llama.cpp: `ggml_rope_yarn` and `ggml_rope_yarn_corr_dims` of ggml, and the defaults of `llama_model::load_hparams`.
    """
    theta = float(file.key("rope.freq_base") or 10000.0)
    plain = theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    if "rope_freqs.weight" in file.tensors:
        plain = plain / file.tensors["rope_freqs.weight"].values().ravel().astype(np.float64)
    factor = float(file.key("rope.scaling.factor") or file.key("rope.scale_linear") or 0.0)
    kind = file.key("rope.scaling.type") or "linear"
    if factor == 0.0 or kind == "none":
        return plain, 1.0
    if kind != "yarn":
        return plain / factor, 1.0
    trained = float(file.key("rope.scaling.original_context_length") or file.key("context_length"))

    def pair(rotations: float) -> float:
        """The pair that turns this often within the context the model was trained with."""
        return size * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(0.0, math.floor(pair(float(file.key("rope.scaling.yarn_beta_fast") or 32.0))))
    high = min(size - 1.0, math.ceil(pair(float(file.key("rope.scaling.yarn_beta_slow") or 1.0))))
    ramp = np.clip((np.arange(size // 2) - low) / max(0.001, high - low), 0.0, 1.0)
    return plain / factor * ramp + plain * (1.0 - ramp), 1.0 + 0.1 * math.log(factor)
