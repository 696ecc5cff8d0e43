"""One request's tensors, checked and turned into the runtime's arguments."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from via_sd.contract.generation_options import for_mode
from via_sd.contract.served_model import (
    DEFAULTS,
    GENERATION_INPUTS,
    GUIDE_TYPES,
    IGNORED_PARAMETERS,
    INPUTS,
    TIMEOUT,
    runtime_options,
)

#: Inputs of several values, or none.
_LISTS = frozenset(spec.name for spec in INPUTS if spec.dims == (-1,))
INPUT_NAMES = frozenset(spec.name for spec in INPUTS)
_GUIDE = ("guided_decoding_guide_type", "guided_decoding_guide")
_BIASED = ("embedding_bias_words", "embedding_bias_weights")

#: Inputs that are taken only where they change nothing, and the values that do not.
_NEUTRAL: dict[str, tuple[tuple[float, ...], str]] = {
    "beam_width": ((1,), "only 1 is supported"),
    "num_return_sequences": ((1,), "only 1 is supported: send the request several times, each with a seed"),
}


class InvalidRequest(Exception):  # noqa: N818 - it names the request, not the program, as what is wrong
    """A request that cannot be served as it stands; the message says what was found and what was wanted."""


@dataclass(frozen=True)
class Defaults:
    """What the model's configuration says about inputs that a request leaves out, and what its bundle says about ends.

    Attributes:
        options: values by name, see `contract.DEFAULTS`.
        eos_token_ids: the tokens that end a text.
        tokens_of: the token ids of a text, without those that begin a prompt.
    """

    apply_chat_template: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    eos_token_ids: frozenset[int] = frozenset()
    tokens_of: Callable[[str], Sequence[int]] = lambda text: ()


@dataclass(frozen=True)
class Request:
    """A checked request: prompt, the runtime's keyword arguments, what the responses hold, seconds it may take."""

    prompt: str
    options: dict[str, Any]
    stream: bool
    echo: bool
    count_input: bool
    count_output: bool
    timeout: float | None = None


def parse_request(tensors: Mapping[str, np.ndarray], parameters: Mapping[str, Any], defaults: Defaults) -> Request:
    """Reads a request's tensors, each `[1, n]`, n = 1 except for lists.

    Args:
        parameters: the request's own. Triton's `generate` makes one of every JSON field that is no input, so a
            misspelt input arrives as one.

    Raises:
        InvalidRequest: no prompt, text that is not UTF-8, a number that is not finite, an unknown parameter, or an
            input whose value is not supported. Ranges are the runtime's to check.
    """
    if misplaced := sorted(INPUT_NAMES.intersection(parameters)):
        raise InvalidRequest(f"{', '.join(misplaced)} came as a parameter of the request: send it as an input tensor")
    if unknown := sorted(set(parameters) - {TIMEOUT, *IGNORED_PARAMETERS}):
        raise InvalidRequest(f"no input of this model is called {', '.join(unknown)}: its config says which there are")
    values = {name: array.reshape(-1) for name, array in tensors.items()}
    if empty := sorted(name for name in values if not len(values[name]) and name not in _LISTS):
        raise InvalidRequest(f"{', '.join(empty)} has no value: give one, or leave the input out")
    prompt = _text("text_input", values["text_input"][0]) if "text_input" in values else ""
    if not prompt:
        raise InvalidRequest("text_input is empty: give the text to continue")
    _refuse_unsupported(values, defaults)
    options = dict(defaults.options)
    if "random_seed" in values:
        options["seed"] = _scalar("random_seed", values["random_seed"][0])
    options |= {name: _value(name, values) for name in GENERATION_INPUTS if name in values and not _blank(values[name])}
    if bias := _bias_of_words(values, defaults.tokens_of):
        if "logit_bias" in values:
            raise InvalidRequest("logit_bias and embedding_bias_words exclude each other: give one of them")
        options["logit_bias"] = bias
    if options.get("top_p") == 0:  # off, to clients of TensorRT-LLM's models
        options["top_p"] = 1.0
    if options.get("max_tokens", 1) < 1:
        raise InvalidRequest(f"max_tokens is {options['max_tokens']}, wanted 1 or more")
    runtime = for_mode(runtime_options(options)) if "mode" in values else runtime_options(options)
    runtime["stop"] = _words(values, "stop_words")
    runtime |= _guide(values)
    runtime["raw"] = not _flag(values, "apply_chat_template", defaults.apply_chat_template)
    runtime["logprobs"] = 0 if _flag(values, "return_log_probs", False) else None
    stream = _flag(values, "stream", False)
    return Request(
        prompt=prompt,
        options=runtime,
        stream=stream,
        # A stream never begins with the prompt: clients of TensorRT-LLM's models would take it for the answer.
        echo=not stream and not _flag(values, "exclude_input_in_output", True),
        count_input=_flag(values, "return_num_input_tokens", False),
        count_output=_flag(values, "return_num_output_tokens", False),
        timeout=_timeout(parameters.get(TIMEOUT)),
    )


def _timeout(microseconds: Any) -> float | None:
    if microseconds is None:
        return None
    try:
        seconds = float(microseconds) / 1e6
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise InvalidRequest(f"{TIMEOUT} is {microseconds!r}, wanted microseconds, more than 0")
    return seconds


def _refuse_unsupported(values: Mapping[str, np.ndarray], defaults: Defaults) -> None:
    for name, (neutral, wanted) in _NEUTRAL.items():
        if name in values and _scalar(name, values[name][0]) not in neutral:
            raise InvalidRequest(f"{name} is {values[name][0]}, and {wanted}")
    if "end_id" in values and (end := int(values["end_id"][0])) not in defaults.eos_token_ids:
        known = ", ".join(map(str, sorted(defaults.eos_token_ids))) or "none"
        raise InvalidRequest(f"end_id is {end}, and only a token that ends this model's text is supported: {known}")


def _blank(array: np.ndarray) -> bool:
    """Whether there is nothing but empty texts in `array`, as clients have it that send every input."""
    return array.size > 0 and array.dtype == np.object_ and not any(array)


def _value(name: str, values: Mapping[str, np.ndarray]) -> Any:
    """The value of a generation option's input: one, or several, or numbers by token id."""
    option = DEFAULTS[name]
    if option.kind is dict:
        return _numbers(name, _text(name, values[name][0]))
    if option.kind is not tuple:
        return _scalar(name, values[name][0])
    return values[name].tolist() if option.items is int else _words(values, name)


def _numbers(name: str, text: str) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidRequest(f'{name} is {text!r:.60}, wanted a JSON object of numbers by token id: {{"11": -5}}')
    return found


def _bias_of_words(values: Mapping[str, np.ndarray], tokens_of: Callable[[str], Sequence[int]]) -> dict[int, float]:
    """What the biases of texts, as TensorRT-LLM's clients send them, come to by token."""
    words, weights = (values.get(name, np.empty(0)) for name in _BIASED)
    if len(words) != len(weights):
        raise InvalidRequest(f"{_BIASED[0]} has {len(words)} texts, and {_BIASED[1]} {len(weights)}: give as many")
    found: dict[int, float] = {}
    for word, weight in zip(words, weights, strict=True):
        for token in tokens_of(_text(_BIASED[0], word)):
            found[token] = found.get(token, 0.0) + _scalar(_BIASED[1], weight)
    return found


def _guide(values: Mapping[str, np.ndarray]) -> dict[str, str]:
    """The grammar that a request names as TensorRT-LLM's clients do, as an option of the runtime's."""
    kind, guide = (_text(name, values[name][0]) if name in values else "" for name in _GUIDE)
    if not kind and not guide:
        return {}
    if kind not in GUIDE_TYPES:
        raise InvalidRequest(f"guided_decoding_guide_type is {kind!r}, wanted one of {', '.join(GUIDE_TYPES)}")
    if kind != "json" and not guide:
        raise InvalidRequest(f"guided_decoding_guide is missing: give the {kind.replace('_', ' ')} that answers follow")
    return {GUIDE_TYPES[kind]: guide or "{}"}


def _flag(values: Mapping[str, np.ndarray], name: str, default: bool) -> bool:
    return bool(values[name][0]) if name in values else default


def _words(values: Mapping[str, np.ndarray], name: str) -> list[str]:
    return [word for entry in values.get(name, ()) if (word := _text(name, entry))]


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
