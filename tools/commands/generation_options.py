"""The options of a generation on the command line, as `GenerationConfig` declares them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Optional

import typer

from via_sd.contract.generation_options import OPTIONS, GenerationConfig
from via_sd.contract.options import Option
from via_sd.tools.commands.console import CommandError

_CONFIG = "config"


def with_generation_options(function: Callable[..., None]) -> Callable[..., None]:
    """Put a command-line option for each declared one in place of the parameter `config` of `function`."""
    offered = [option for option in OPTIONS.values() if option.command_line]
    parameters: list[inspect.Parameter] = []
    for each in inspect.signature(function, eval_str=True).parameters.values():
        if each.name == _CONFIG:
            parameters += map(_parameter, offered)
        else:
            parameters.append(each)

    @functools.wraps(function)
    def wrapped(**given: Any) -> None:
        values = {option.name: given.pop(option.name) for option in offered}
        function(**given, **{_CONFIG: GenerationConfig(**values)})

    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapped


def read_settings(given: Sequence[str], flag: str) -> dict[str, Any]:
    """The options that `NAME=VALUE` texts set, by name.

    Raises:
        CommandError: a text of another form, no option of that name, or no value of its type; `flag` took the texts.
    """
    values: dict[str, Any] = {}
    for name, text in split_settings(given, flag):
        if name not in OPTIONS:
            raise CommandError(f"{flag}: no option is called {name!r}; options are {', '.join(OPTIONS)}")
        try:
            values[name] = OPTIONS[name].parse(text)
        except ValueError as error:
            raise CommandError(f"{flag}: {name} is {error}") from None
    return values


def split_settings(given: Sequence[str], flag: str) -> Iterator[tuple[str, str]]:
    """The names and values of `NAME=VALUE` texts that `flag` took."""
    for each in given:
        name, equals, value = each.partition("=")
        if not equals:
            raise CommandError(f"{flag} is {each!r}, wanted NAME=VALUE")
        yield name, value


def _parameter(option: Option) -> inspect.Parameter:
    kind: Any = list[str] if option.kind is tuple else option.kind
    flags = [f"--{option.name.replace('_', '-')}"] if option.kind is bool else []  # one flag, no `--no-…` beside it
    declared = typer.Option(*flags, help=option.help, show_default=option.if_none or option.kind is not bool)
    annotation: Any = Annotated[Optional[kind] if option.may_be_none else kind, declared]  # noqa: UP045 - a value
    default = None if option.kind is tuple else option.default
    anywhere = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(option.name, anywhere, default=default, annotation=annotation)
