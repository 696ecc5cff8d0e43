"""What a model's generation_config.json asks of a runtime: rules that are followed, settings that are offered."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from via_sd.contract.model_settings import RULES, SAMPLING, check_settings
from via_sd.errors import ExportError

FILE = "generation_config.json"
#: Would change the text, and are not followed; with the values that change nothing.
_NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "diversity_penalty": (0,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "sequence_bias": (),
    "force_words_ids": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
    "watermarking_config": (),
}
_OFF = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}


def read_generation_config(source: Path) -> dict[str, Any]:
    """The rules and sampling settings in `source`, for the manifest; a warning says what of them is not followed.

    Raises:
        ExportError: a value of another type.
    """
    file = source / FILE
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{file} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ExportError(f"{file} holds {data!r:.60}, wanted a JSON object")
    known = {name: data[name] for name in (*RULES, *SAMPLING) if data.get(name) is not None}
    try:
        check_settings(known)
    except ValueError as error:
        raise ExportError(f"{file}: {error}; repair it, or leave it out") from None
    ignored = [name for name, off in _NOT_FOLLOWED.items() if data.get(name) is not None and data[name] not in off]
    if ignored:
        warnings.warn(f"{FILE} sets {', '.join(ignored)}, which this runtime does not follow", stacklevel=2)
    if not data.get("do_sample"):  # transformers leaves out the rest then
        known = {name: value for name, value in known.items() if name in RULES or name == "repetition_penalty"}
    known = {name: value for name, value in known.items() if value != _OFF.get(name, ()) and value not in (0, [])}
    if sampling := {name: known[name] for name in SAMPLING if name in known}:
        settings = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
        warnings.warn(
            f"{FILE} recommends {settings}; generation is greedy unless a request asks: see pipeline.sampling_defaults",
            stacklevel=2,
        )
    return known
