"""One request's tensors, checked and turned into the runtime's arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Input tensors that are handed to the runtime under another name.
_RENAMED = {"max_tokens": "max_new_tokens"}
_HANDED_ON = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "seed",
    "mode",
    "ignore_eos",
)
_ONLY_ZERO = ("presence_penalty", "frequency_penalty")


class InvalidRequest(Exception):  # noqa: N818 - it names the request, not the program, as what is wrong
    """A request that cannot be served as it stands; the message says what was found and what was wanted."""


@dataclass(frozen=True)
class Defaults:
    """What the model's configuration says about inputs that a request leaves out."""

    apply_chat_template: bool = False
    mode: str | None = None


@dataclass(frozen=True)
class Request:
    """A checked request: the prompt, the runtime's keyword arguments, and what the responses should hold."""

    prompt: str
    options: dict[str, Any]
    stream: bool
    echo: bool
    count_input: bool
    count_output: bool


def parse_request(tensors: Mapping[str, np.ndarray], defaults: Defaults) -> Request:
    """Reads a request's tensors, each `[1, n]`, n = 1 except for `stop_words`.

    Raises:
        InvalidRequest: no prompt, text that is not UTF-8, a number that is not finite, or a penalty that is not
            supported. Ranges are the runtime's to check.
    """
    values = {name: array.reshape(-1) for name, array in tensors.items()}
    prompt = _text("text_input", values["text_input"][0])
    if not prompt:
        raise InvalidRequest("text_input is empty: give the text to continue")
    options: dict[str, Any] = {}
    for name in _HANDED_ON:
        if name in values:
            options[_RENAMED.get(name, name)] = _scalar(name, values[name][0])
    if options.get("max_new_tokens", 1) < 1:
        raise InvalidRequest(f"max_tokens is {options['max_new_tokens']}, wanted 1 or more")
    for name in _ONLY_ZERO:
        if name in values and _scalar(name, values[name][0]) != 0:
            raise InvalidRequest(f"{name} is {values[name][0]}, and only 0 is supported: use repetition_penalty")
    if "stop_words" in values:
        options["stop"] = [word for entry in values["stop_words"] if (word := _text("stop_words", entry))]
    if defaults.mode is not None:
        options.setdefault("mode", defaults.mode)
    options["raw"] = not _flag(values, "apply_chat_template", defaults.apply_chat_template)
    return Request(
        prompt=prompt,
        options=options,
        stream=_flag(values, "stream", False),
        echo=not _flag(values, "exclude_input_in_output", True),
        count_input=_flag(values, "return_num_input_tokens", False),
        count_output=_flag(values, "return_num_output_tokens", False),
    )


def _flag(values: Mapping[str, np.ndarray], name: str, default: bool) -> bool:
    return bool(values[name][0]) if name in values else default


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, bytes):
        return _text(name, value)
    plain = value.item()
    if not isinstance(plain, float):
        return plain
    if not math.isfinite(plain):
        raise InvalidRequest(f"{name} is {plain}: give a finite number")
    # The client wrote 0.8 and FP32 made 0.800000012 of it: the shortest decimal of that FP32 is 0.8 again, and with it
    # the output is the library's own.
    return float(str(value))


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not UTF-8 text ({error.reason} at byte {error.start})") from None
