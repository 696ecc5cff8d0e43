"""The served model's inputs, outputs and parameters, as data: the configuration writer and the model both read these.

Names follow the Triton models of TensorRT-LLM, so that their clients, and Triton's OpenAI front end, work unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DataType = Literal["STRING", "BOOL", "INT32", "UINT64", "FP32"]


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


INPUTS = (
    _one("text_input", "STRING", "the prompt, UTF-8", optional=False),
    _one("max_tokens", "INT32", "most tokens to generate"),
    _one("stream", "BOOL", "one response per chunk of text; otherwise one response with the whole text"),
    _one("temperature", "FP32", "0 (the default) is greedy"),
    _one("top_k", "INT32", "sample from this many most probable tokens; 0 or absent: all"),
    _one("top_p", "FP32", "sample from the smallest set with at least this probability"),
    _one("min_p", "FP32", "leave out tokens below this share of the most probable one's probability"),
    _one("repetition_penalty", "FP32", "over 1 makes tokens that occurred less likely"),
    _one("presence_penalty", "FP32", "only 0 is supported"),
    _one("frequency_penalty", "FP32", "only 0 is supported"),
    _one("seed", "UINT64", "same seed, same output"),
    TensorSpec("stop_words", "STRING", (-1,), "texts that end the output; they are not part of it"),
    _one("ignore_eos", "BOOL", "go on to max_tokens whatever the model says"),
    _one("mode", "STRING", "plain, speculative, cascade, routed or auto"),
    _one("exclude_input_in_output", "BOOL", "false puts the prompt in front of the output; true is the default"),
    _one("apply_chat_template", "BOOL", "wrap the prompt in the model's chat template as a user's message"),
    _one("return_num_input_tokens", "BOOL", "adds the output num_input_tokens"),
    _one("return_num_output_tokens", "BOOL", "adds the output num_output_tokens"),
)

#: With every response.
TEXT_OUTPUT = _one("text_output", "STRING", "the text, or with `stream` what is new of it", optional=False)
#: With every response that has text, when the request asks for them.
COUNT_OUTPUTS = (
    _one("num_input_tokens", "INT32", "tokens of the prompt"),
    _one("num_output_tokens", "INT32", "tokens generated; with `stream`, those of this response"),
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
OUTPUTS = (TEXT_OUTPUT, *COUNT_OUTPUTS, *FINAL_OUTPUTS)
