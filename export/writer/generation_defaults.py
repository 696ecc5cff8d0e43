"""What a checkpoint's `generation_config.json` asks for that a bundle does not do by itself: said at export."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Settings of sampling, which a caller gives with a request.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
#: Settings that change which tokens can come, and that no request can give -> the value that asks for nothing.
_UNSUPPORTED: dict[str, Any] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "diversity_penalty": 0.0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_decoder_ids": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": None,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "typical_p": 1.0,
}


def warn_of_generation_defaults(source: Path, config: Mapping[str, Any]) -> None:
    """Warn of settings in `config`, the generation configuration of `source`, that generations will not have."""
    asked = [key for key, nothing in _UNSUPPORTED.items() if config.get(key) not in (None, nothing, [], {})]
    if asked:
        warnings.warn(
            f"{source / 'generation_config.json'} asks for {', '.join(asked)}, which a bundle does not do",
            stacklevel=3,
        )
    sampling = {key: config[key] for key in _SAMPLING if config.get(key) is not None}
    if not config.get("do_sample"):
        penalty = sampling.get("repetition_penalty")
        sampling = {} if penalty in (None, 1.0) else {"repetition_penalty": penalty}
    if sampling:
        options = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in sampling.items())
        warnings.warn(
            f"{source / 'generation_config.json'} asks for sampling with {options}; a bundle is greedy unless a "
            "request asks for them",
            stacklevel=3,
        )
