"""What a manifest may say: the checks of single values that the contracts of the formats are made of.

A manifest comes from elsewhere. Its values are checked here before anything is opened, allocated or written by them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Union

#: Longest name of a file or a tier.
_LONGEST_NAME = 200
#: Largest of the sizes that a model's dimensions can have.
LARGEST_DIMENSION = 1 << 24


@dataclass(frozen=True)
class Value:
    """A kind of value: what it is called in a message, and which values are of the kind."""

    wanted: str
    fits: Callable[[Any], bool]


#: The keys that are read of an object, and what each of them holds.
Contract = Mapping[str, Union[Value, "Contract"]]


def check(data: Any, contract: Contract, where: str = "") -> None:
    """Compare an object with its contract; keys that the contract does not name are not looked at.

    Raises:
        ValueError: names the key, what it holds, and what was wanted.
    """
    for key, wanted in contract.items():
        if key not in data:
            raise ValueError(f"{where}{key} is missing")
        kind = wanted if isinstance(wanted, Value) else OBJECT
        if not kind.fits(data[key]):
            raise ValueError(f"{where}{key} is {describe(data[key])}, wanted {kind.wanted}")
        if not isinstance(wanted, Value):
            check(data[key], wanted, f"{where}{key}.")


def check_keys(data: Mapping[str, Any], kind: Value, where: str) -> None:
    """Raise `ValueError` for a key of `data` that is not of `kind`."""
    for key in data:
        if not kind.fits(key):
            raise ValueError(f"{where} has {describe(key)}, wanted {kind.wanted}")


def describe(value: Any) -> str:
    """A value of a manifest for a message: short, in one line, without characters that steer a terminal."""
    text = ascii(value) if not isinstance(value, (list, dict)) else f"{type(value).__name__} of {len(value)}"
    return text if len(text) <= 60 else text[:60] + " ..."


def whole(low: int, high: int) -> Value:
    """A whole number from `low` to `high`."""
    return Value(f"a whole number from {low} to {high}", lambda value: _is_whole(value) and low <= value <= high)


def one_of(*known: str) -> Value:
    """One of some words."""
    return Value(" or ".join(map(repr, known)), lambda value: isinstance(value, str) and value in known)


def list_of(kind: Value) -> Value:
    """A list of values of one kind."""
    return Value(f"a list, each {kind.wanted}", lambda value: isinstance(value, list) and all(map(kind.fits, value)))


def by_name(kind: Value) -> Value:
    """An object whose values are of one kind."""
    return Value(
        f"an object, each value {kind.wanted}",
        lambda value: isinstance(value, dict) and all(map(kind.fits, value.values())),
    )


def optional(kind: Value) -> Value:
    """A value of one kind, or null."""
    return Value(f"{kind.wanted}, or null", lambda value: value is None or kind.fits(value))


def is_name(value: Any) -> bool:
    """Whether `value` names something in a folder: no separator, no `..`, nothing that a terminal would obey."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= _LONGEST_NAME
        and value not in (".", "..")
        and value.isprintable()
        and not set(value) & set("/\\:")
    )


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and all(is_name(part) for part in value.split("/"))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


OBJECT = Value("an object", lambda value: isinstance(value, dict))
LIST = Value("a list", lambda value: isinstance(value, list))
TEXT = Value("a text", lambda value: isinstance(value, str))
NUMBER = Value("a number", lambda value: isinstance(value, (int, float)) and not isinstance(value, bool))
BOOLEAN = Value("true or false", lambda value: isinstance(value, bool))
NAME = Value("a name without separators", is_name)
PATH = Value("the path of a file within the folder, without '..'", _is_path)
DIMENSION = whole(1, LARGEST_DIMENSION)
BYTES = whole(0, 1 << 62)
