"""What a bundle keeps of its model's generation_config.json: rules that are followed, sampling that is offered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Followed unless a request says otherwise: they say which tokens the model must not write.
RULES = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "no_repeat_ngram_size", "min_new_tokens")
#: Offered: how the model's publisher would draw tokens. Generation is greedy unless a request asks for them.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ValueError unless every rule and sampling setting in `settings` is of its type."""
    for name in (*RULES, *SAMPLING):
        if name in settings and not _fits(name, settings[name]):
            raise ValueError(f"{name} is {settings[name]!r:.60}")


def _fits(name: str, value: Any) -> bool:
    if name in ("suppress_tokens", "begin_suppress_tokens"):
        return isinstance(value, list) and all(_is_whole(token) for token in value)
    if name == "bad_words_ids":
        return isinstance(value, list) and all(isinstance(w, list) and w and all(map(_is_whole, w)) for w in value)
    if name in ("no_repeat_ngram_size", "min_new_tokens", "top_k"):
        return _is_whole(value)
    return type(value) in (int, float) and 0 <= value < 1e6


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31
