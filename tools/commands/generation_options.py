"""The options of a generation on the command line, as `GenerationConfig` declares them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from via_sd.contract.generation_options import OPTIONS, GenerationConfig
from via_sd.contract.options import Option
from via_sd.tools.commands.console import CommandError
from via_sd.tools.commands.option_groups import option as command_line_option
from via_sd.tools.commands.option_groups import with_group


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


def _value(option: Option, given: Any) -> Any:
    """The value of an option: what was given, or what is in the file that was."""
    if not option.from_file or given is None:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise CommandError(f"--{_flag(option)} {given} cannot be read: {reason}") from None


def _flag(option: Option) -> str:
    return option.flag.replace("_", "-")


def _parameter(option: Option) -> inspect.Parameter:
    several = option.kind in (tuple, dict)
    kind: Any = list[option.items if option.kind is tuple else str] if several else option.kind  # type: ignore[misc]
    flags: list[str] = []
    if option.kind is bool:  # one flag: what changes the default
        flags = [f" /--no-{_flag(option)}" if option.default else f"--{_flag(option)}"]
    elif option.flag != option.name:
        flags = [f"--{_flag(option)}"]
    shown = option.if_none or option.kind is not bool
    declared = typer.Option(*flags, help=option.help, show_default=shown, metavar="FILE" if option.from_file else None)
    annotation: Any = Annotated[Optional[kind] if option.may_be_none or several else kind, declared]  # noqa: UP045 - a value
    return command_line_option(option.name, annotation, None if several else option.default)


_OFFERED = {name: option for name, option in OPTIONS.items() if option.command_line}


def _read(**given: Any) -> GenerationConfig:
    return GenerationConfig(**{name: _value(_OFFERED[name], value) for name, value in given.items()})


#: The parameter `config` of a command becomes an option for each declared one.
with_generation_options = with_group("config", map(_parameter, _OFFERED.values()), _read)
