"""Options declared once, as fields of a dataclass: type, default, range and help text, and where they are offered.

A field made with `declare` carries its declaration. `options_of` reads the declarations back as data; the checks of a
value, the command line and the Triton model follow from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from numbers import Integral, Real
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from via_sd.errors import RequestError

_OPTION = "option"


class Served(Enum):
    """How a Triton model offers an option: REQUEST and OPERATOR ones may have a default in its `config.pbtxt`."""

    REQUEST = "an input of every request"
    OPERATOR = "for whoever runs the server"
    NO = "not under a name of its own"


@dataclass(frozen=True)
class Range:
    """An interval of numbers: from `low` to `high`, without `low` if `above`, without `high` if `below`."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and (
            value < self.high if self.below else value <= self.high
        )

    def __str__(self) -> str:
        if self.high == math.inf:
            finite = " and finite" if self.below else ""
            return (f"more than {self.low}" if self.above else f"{self.low} or more") + finite
        if not self.above and not self.below:
            return f"{self.low} to {self.high}"
        low, high = "more than" if self.above else "at least", "less than" if self.below else "at most"
        return f"{low} {self.low} and {high} {self.high}"


@dataclass(frozen=True)
class Option:
    """An option as it was declared.

    Attributes:
        kind: str, bool, int, float, tuple for several strings or whole numbers, or dict for numbers by token id.
        default: the value where none is given.
        may_be_none: whether None is a value.
        help: what the option does.
        range: the numbers it may be.
        choices: the strings it may be; any if empty.
        if_none: what None means, in words.
        served: how a Triton model offers it.
        triton_name: its name there.
        command_line: whether `generate` offers it.
        items: what a tuple holds: str or int.
        flag: its name on the command line, if that is another.
        from_file: whether the command line takes the name of a file with the value.
    """

    name: str
    kind: type
    default: Any
    may_be_none: bool
    help: str
    range: Range = Range()
    choices: tuple[str, ...] = ()
    if_none: str | None = None
    served: Served = Served.NO
    triton_name: str = ""
    command_line: bool = True
    items: type = str
    flag: str = ""
    from_file: bool = False

    def check(self, value: Any) -> Any:
        """The value to keep: `value`, or a tuple where the option takes several.

        Raises:
            RequestError: a value of another type, out of range, or not among the choices.
        """
        if value is None and self.may_be_none and (self.kind is not tuple or self.default is None):
            return value
        if self.kind is tuple:
            return self._check_items(() if value is None else value)
        if self.kind is dict:
            return self._check_numbers({} if value is None else value)
        if self.kind is bool and not isinstance(value, bool):
            raise RequestError(f"{self.name} is {value!r}, wanted true or false")
        if self.kind is str and not isinstance(value, str):
            raise RequestError(f"{self.name} is {value!r:.60}, wanted a text")
        if self.choices and value not in self.choices:
            raise RequestError(f"{self.name} {value!r} is not known; {self.name}s are {', '.join(self.choices)}")
        if self.kind is int and not isinstance(value, Integral):
            raise RequestError(f"{self.name} is {value!r}, wanted a whole number")
        if self.kind is float and not isinstance(value, Real):
            raise RequestError(f"{self.name} is {value!r}, wanted a number")
        if self.kind in (int, float) and value not in self.range:
            raise RequestError(f"{self.name} is {value}, wanted {self.range}")
        return value

    def parse(self, text: str) -> Any:
        """The value that `text` stands for; `check` has still to be asked whether it may be.

        Raises:
            ValueError: `text` stands for no value of the option's type; the message says which was wanted.
        """
        if self.kind is dict:
            return (text,)
        try:
            if self.kind is tuple:
                return (text,) if self.items is str else tuple(int(each) for each in text.split(","))
            return {"true": True, "false": False}[text] if self.kind is bool else self.kind(text)
        except (KeyError, ValueError):
            wanted = {bool: "true or false", int: "a whole number", float: "a number"}.get(self.kind, "whole numbers")
            raise ValueError(f"{text!r}, wanted {wanted}") from None

    def _check_items(self, value: Any) -> tuple[Any, ...]:
        several = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
        items = tuple(value) if several else (value,)
        if self.items is str:
            if not all(isinstance(item, str) for item in items):
                raise RequestError(f"{self.name} is {value!r}, wanted strings")
            return items
        if not all(_is_whole(item) and item in self.range for item in items):
            raise RequestError(f"{self.name} is {value!r:.60}, wanted whole numbers, {self.range}")
        return tuple(map(int, items))

    def _check_numbers(self, value: Any) -> dict[int, float]:
        """Numbers by token id; a key may be written as text (JSON has no others), an entry as `ID=NUMBER`."""
        try:
            if not isinstance(value, Mapping):
                value = dict(str(entry).split("=", 1) for entry in value)
            found = {int(token): float(number) for token, number in value.items()}
        except (TypeError, ValueError):
            raise RequestError(f"{self.name} is {value!r:.60}, wanted numbers by token id") from None
        if not all(token >= 0 and number in self.range for token, number in found.items()):
            raise RequestError(f"{self.name} is {value!r:.60}, wanted numbers of {self.range} by token id")
        return found


def _is_whole(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral)


def declare(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field that declares an option.

    Args:
        more: what else `Option` holds: `range`, `choices`, `if_none`, `served`, `triton_name`, `command_line`, `flag`,
            `from_file`.
    """
    return field(default=default, metadata={_OPTION: {"help": help, **more}})


def options_of(declaring: type) -> dict[str, Option]:
    """The options that the dataclass `declaring` declares, by name, in order."""
    hints = get_type_hints(declaring)
    found = {}
    for each in fields(declaring):
        hint = hints[each.name]
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        known = {"triton_name": each.name, "flag": each.name, **each.metadata[_OPTION]}
        kind: type = next((kind for kind in (str, bool, int, float) if kind in kinds), tuple)
        if kind is tuple and any(get_origin(one) is Mapping for one in kinds):
            kind = dict
        if kind is tuple and any(get_args(one) == (int,) for one in kinds):
            known["items"] = int
        found[each.name] = Option(each.name, kind, each.default, type(None) in kinds, **known)
    return found
