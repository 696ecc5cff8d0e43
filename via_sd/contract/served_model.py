"""The served model's inputs, outputs and parameters, as data: the configuration writer and the model both read these.

Names follow the Triton models of TensorRT-LLM, so that their clients, and Triton's OpenAI front end, work unchanged.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from via_sd.contract.generation_options import OPTIONS
from via_sd.contract.options import Option, Served

DataType = Literal["STRING", "BOOL", "INT32", "UINT32", "UINT64", "FP32"]
_DATA_TYPES: dict[type, DataType] = {str: "STRING", bool: "BOOL", int: "INT32", float: "FP32"}


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


def _input_of(option: Option) -> TensorSpec:
    """A request's input for a generation option."""
    if option.kind is tuple:
        return TensorSpec(option.triton_name, _DATA_TYPES[option.items], (-1,), option.help)
    if option.kind is dict:
        return _one(option.triton_name, "STRING", "added to the logits of tokens: a JSON object of numbers by token id")
    wide = option.kind is int and 2**31 <= option.range.high < math.inf  # INT32 is what clients send of the others
    return _one(option.triton_name, "UINT64" if wide else _DATA_TYPES[option.kind], option.help)


#: The kinds of guide that TensorRT-LLM's models know, and the options that they stand for here.
GUIDE_TYPES = {"json": "json_schema", "json_schema": "json_schema", "regex": "regex", "ebnf_grammar": "grammar"}
#: What is handed on to the runtime as it is.
_GENERATION = tuple(_input_of(option) for option in OPTIONS.values() if option.served is Served.REQUEST)
#: What TensorRT-LLM's clients send whether they need it or not: taken where it changes nothing, else refused.
_COMPATIBLE = (
    _one("random_seed", "UINT64", "seed, as older clients call it"),
    _one("length_penalty", "FP32", "no effect: it ranks beams, and there is one"),
    _one("beam_width", "INT32", "only 1 is supported"),
    _one("num_return_sequences", "INT32", "only 1 is supported"),
    _one("end_id", "INT32", "only a token that ends the model's text anyway is supported"),
    _one("pad_id", "INT32", "no effect: nothing is padded"),
)
INPUTS = (
    _one("text_input", "STRING", "the prompt, UTF-8", optional=False),
    _one("stream", "BOOL", "one response per chunk of text; otherwise one response with the whole text"),
    *_GENERATION,
    TensorSpec("stop_words", "STRING", (-1,), "texts that end the output; they are not part of it"),
    _one("guided_decoding_guide_type", "STRING", f"what form the answer has: {', '.join(GUIDE_TYPES)}"),
    _one("guided_decoding_guide", "STRING", "the JSON schema, regular expression or grammar of that form"),
    TensorSpec("embedding_bias_words", "STRING", (-1,), "texts to whose tokens a bias is added"),
    TensorSpec("embedding_bias_weights", "FP32", (-1,), "the biases of these texts"),
    _one("exclude_input_in_output", "BOOL", "false puts the prompt in front of an answer in one piece"),
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
#: The options that `config.pbtxt` may hold a default of, for what a request leaves out, by their name there.
DEFAULTS = {option.triton_name: option for option in OPTIONS.values() if option.served is not Served.NO}


def contract_digest() -> str:
    """A hash of everything above that a model's configuration repeats: it changes when they can no longer agree."""
    described = [repr(INPUTS), repr(OUTPUTS), repr({name: option.kind.__name__ for name, option in DEFAULTS.items()})]
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]


def runtime_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, which the Triton model's names key, by the names of `GenerationConfig`."""
    return {DEFAULTS[name].name: value for name, value in values.items()}


def parse_default(name: str, text: str) -> Any:
    """The value that `text` stands for, for the default `name`.

    Raises:
        ValueError: no default of that name, or no value of its type.
    """
    if name not in DEFAULTS:
        raise ValueError(f"no default is called {name!r}; defaults are {', '.join(DEFAULTS)}")
    try:
        return DEFAULTS[name].parse(text)
    except ValueError as error:
        raise ValueError(f"{name} is {error}") from None
