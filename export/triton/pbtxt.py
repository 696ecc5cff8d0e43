"""Protobuf text format, as much of it as a model configuration needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias


class Word(str):
    """An enum value: written without quotes."""

    __slots__ = ()


Scalar: TypeAlias = "str | int | float | bool | Word"
Field: TypeAlias = "Scalar | Message | Sequence[Scalar] | Sequence[Message]"
Message: TypeAlias = "Mapping[str, Field]"

_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def to_pbtxt(message: Message) -> str:
    """`message` in text format; a list becomes a repeated field."""
    return "".join(f"{line}\n" for line in _lines(message, ""))


def string_map(values: Mapping[str, str]) -> list[Message]:
    """Entries of a map from names to messages with one `string_value`, as `parameters` is."""
    return [{"key": key, "value": {"string_value": value}} for key, value in values.items()]


def _lines(message: Message, indent: str) -> Iterator[str]:
    for name, value in message.items():
        if isinstance(value, Mapping):
            yield from _block(name, value, indent)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            messages = [each for each in value if isinstance(each, Mapping)]
            if messages:
                for each in messages:
                    yield from _block(name, each, indent)
            else:
                yield f"{indent}{name}: [ {', '.join(_scalar(each) for each in value)} ]"  # type: ignore[arg-type]
        else:
            yield f"{indent}{name}: {_scalar(value)}"


def _block(name: str, message: Message, indent: str) -> Iterator[str]:
    yield f"{indent}{name} {{"
    yield from _lines(message, indent + "  ")
    yield f"{indent}}}"


def _scalar(value: Scalar) -> str:
    if isinstance(value, Word):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(_ESCAPES.get(char, char) for char in value) + '"'
    return repr(value)
