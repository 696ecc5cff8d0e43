"""The served model's inputs, outputs and parameters, as data: the configuration writer and the model both read these.

Names follow the Triton models of TensorRT-LLM, so that their clients, and Triton's OpenAI front end, work unchanged.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

DataType = Literal["STRING", "BOOL", "INT32", "UINT64", "FP32"]
_TYPES: dict[DataType, type] = {"STRING": str, "BOOL": bool, "INT32": int, "UINT64": int, "FP32": float}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the model: shape `[1, *dims]`, the 1 being Triton's batch dimension."""

    name: str
    data_type: DataType
    dims: tuple[int, ...]
    meaning: str
    optional: bool = True


def _one(name: str, data_type: DataType, meaning: str, *, optional: bool = True) -> TensorSpec:
    return TensorSpec(name, data_type, (1,), meaning, optional)


#: What is handed on to the runtime as it is.
_GENERATION = (
    _one("max_tokens", "INT32", "most tokens to generate"),
    _one("temperature", "FP32", "0 (the default) is greedy"),
    _one("top_k", "INT32", "sample from this many most probable tokens; 0 or absent: all"),
    _one("top_p", "FP32", "sample from the smallest set with at least this probability"),
    _one("min_p", "FP32", "leave out tokens below this share of the most probable one's probability"),
    _one("repetition_penalty", "FP32", "over 1 makes tokens that occurred less likely"),
    _one("seed", "UINT64", "same seed, same output"),
    _one("ignore_eos", "BOOL", "go on to max_tokens whatever the model says"),
    _one("mode", "STRING", "plain, speculative, cascade, routed or auto"),
)
#: What TensorRT-LLM's clients send whether they need it or not: taken where it changes nothing, else refused.
_COMPATIBLE = (
    _one("random_seed", "UINT64", "seed, as older clients call it"),
    _one("presence_penalty", "FP32", "only 0 is supported"),
    _one("frequency_penalty", "FP32", "only 0 is supported"),
    _one("length_penalty", "FP32", "no effect: it ranks beams, and there is one"),
    _one("beam_width", "INT32", "only 1 is supported"),
    _one("num_return_sequences", "INT32", "only 1 is supported"),
    _one("min_tokens", "INT32", "only 0 and 1 are supported"),
    TensorSpec("bad_words", "STRING", (-1,), "only empty ones are supported"),
    _one("end_id", "INT32", "only a token that ends the model's text anyway is supported"),
    _one("pad_id", "INT32", "no effect: nothing is padded"),
)
INPUTS = (
    _one("text_input", "STRING", "the prompt, UTF-8", optional=False),
    _one("stream", "BOOL", "one response per chunk of text; otherwise one response with the whole text"),
    *_GENERATION,
    TensorSpec("stop_words", "STRING", (-1,), "texts that end the output; they are not part of it"),
    _one("exclude_input_in_output", "BOOL", "false puts the prompt in front of the output; true is the default"),
    _one("apply_chat_template", "BOOL", "wrap the prompt in the model's chat template as a user's message"),
    _one("return_num_input_tokens", "BOOL", "adds the output num_input_tokens"),
    _one("return_num_output_tokens", "BOOL", "adds the output num_output_tokens"),
    _one("return_log_probs", "BOOL", "adds the outputs cum_log_probs and output_log_probs"),
    *_COMPATIBLE,
)

#: With every response.
TEXT_OUTPUT = _one("text_output", "STRING", "the text, or with `stream` what is new of it", optional=False)
#: With every response that has text, when the request asks for them.
COUNT_OUTPUTS = (
    _one("num_input_tokens", "INT32", "tokens of the prompt"),
    _one("num_output_tokens", "INT32", "tokens generated; with `stream`, those of this response"),
)
#: With the last response, when the request asks for them.
LOG_PROB_OUTPUTS = (
    TensorSpec("cum_log_probs", "FP32", (-1,), "sum of output_log_probs; one, for the one beam there is"),
    TensorSpec("output_log_probs", "FP32", (-1, -1), "natural log-probability of every token, [1, tokens]"),
)
#: With the last response only.
FINAL_OUTPUTS = (
    _one("finish_reason", "STRING", "stop or length"),
    _one("mode_used", "STRING", "the decoding mode that ran"),
    _one("acceptance_rate", "FP32", "accepted over drafted tokens; 0 when nothing was drafted"),
    _one("total_accepted_draft_tokens", "INT32", "drafted tokens that were kept"),
    _one("total_draft_tokens", "INT32", "drafted tokens"),
    _one("draft_tier_tokens", "INT32", "tokens of the output that the drafter proposed"),
    _one("slim_tier_tokens", "INT32", "tokens of the output that the slim-verifier wrote"),
    _one("full_tier_tokens", "INT32", "tokens of the output that the full verifier wrote"),
    _one("escalations", "INT32", "times the router went to the full verifier"),
    _one("checked_by_full", "FP32", "share of the output's tokens that the full verifier has judged"),
)
OUTPUTS = (TEXT_OUTPUT, *COUNT_OUTPUTS, *LOG_PROB_OUTPUTS, *FINAL_OUTPUTS)

#: The request parameter with a time-out in microseconds. Triton's clients have it; over HTTP it comes as a field.
TIMEOUT = "timeout"
#: Further parameters that say nothing about the output, and that clients send over HTTP.
IGNORED_PARAMETERS = ("id", "model", "priority")

#: Parameters of `config.pbtxt` that tell which release wrote it, and for which contract.
WRITTEN_BY, CONTRACT = "written_by", "contract"

GENERATION_INPUTS = tuple(spec.name for spec in _GENERATION)
#: Those that the runtime knows under another name.
RUNTIME_NAMES = {"max_tokens": "max_new_tokens"}
#: Parameters of `config.pbtxt` that stand for what a request leaves out, and their types. Beyond the inputs these are
#: the runtime's own settings of drafting and routing.
DEFAULTS: dict[str, type] = {
    **{spec.name: _TYPES[spec.data_type] for spec in _GENERATION},
    "gamma": int,
    "router": str,
    "alpha1": float,
    "alpha2": float,
    "max_lag": int,
    "max_divergence": float,
}


def contract_digest() -> str:
    """A hash of everything above that a model's configuration repeats: it changes when they can no longer agree."""
    described = [repr(INPUTS), repr(OUTPUTS), repr({name: kind.__name__ for name, kind in DEFAULTS.items()})]
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]


def parse_default(name: str, text: str) -> str | bool | int | float:
    """The value that `text` writes for the default `name`.

    Raises:
        ValueError: no default of that name, or no value of its type.
    """
    if name not in DEFAULTS:
        raise ValueError(f"no default is called {name!r}; defaults are {', '.join(DEFAULTS)}")
    kind = DEFAULTS[name]
    try:
        value: str | bool | int | float = {"true": True, "false": False}[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise ValueError(f"{name} is {text!r}, wanted {wanted}") from None
    return value
