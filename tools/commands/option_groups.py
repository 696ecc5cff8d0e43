"""Options that several commands have: declared once, and given to a command as one value."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, get_type_hints

Command = Callable[..., None]
Decorator = Callable[[Command], Command]


def with_group(name: str, options: Iterable[inspect.Parameter], read: Callable[..., Any]) -> Decorator:
    """A decorator that puts `options` in place of the parameter `name` of a command.

    Typer reads the options from the signature; the command gets `read(**values)` as `name`.
    """
    options = list(options)

    def decorate(function: Command) -> Command:
        parameters: list[inspect.Parameter] = []
        for each in inspect.signature(function, eval_str=True).parameters.values():
            parameters += options if each.name == name else [each]

        @functools.wraps(function)
        def wrapped(**given: Any) -> None:
            values = {option.name: given.pop(option.name) for option in options}
            function(**given, **{name: read(**values)})

        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
        return wrapped

    return decorate


def option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """The option `name`: `annotation` is what typer reads."""
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def options_of(kind: type[Any]) -> list[inspect.Parameter]:
    """An option for each field of a dataclass."""
    annotations = get_type_hints(kind, include_extras=True)
    return [option(field.name, annotations[field.name], field.default) for field in dataclasses.fields(kind)]
