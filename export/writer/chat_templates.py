"""A model's chat templates, wherever it keeps them: the default one, and others by name."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from via_sd.contract.chat_template import ChatTemplate
from via_sd.errors import ExportError, RequestError

DEFAULT = "default"
_FILE, _FOLDER = "chat_template.jinja", "additional_chat_templates"
#: Configurations that may hold `chat_template`, in the order in which transformers goes by them.
_CONFIGURATIONS = ("tokenizer_config.json", "chat_template.json", "processor_config.json")


def read_chat_templates(
    source: Path, special_tokens: Mapping[str, str], given: Path | None = None
) -> tuple[str | None, dict[str, str]]:
    """The default chat template of the model in `source`, and its others by name.

    A model with a single template under another name has that one as its default. Without any, or without a default
    among several, a warning says that prompts will go as they are.

    Args:
        special_tokens: by role, see `ChatTemplate`.
        given: a file with a template to take as the default instead.

    Raises:
        ExportError: a template that cannot be parsed, or a file that cannot be read.
    """
    named: dict[str, str] = {}
    for place, name, text in _found(source, given):
        if name in named:
            continue
        try:
            ChatTemplate(text, special_tokens)
        except RequestError as error:
            raise ExportError(f"{place}: {error}; repair it, or give another with --chat-template") from None
        named[name] = text
    default = named.pop(DEFAULT, None)
    if default is None and len(named) == 1:
        default = named.pop(next(iter(named)))
    if default is None:
        has = f"no default among its chat templates ({', '.join(sorted(named))})" if named else "no chat template"
        warnings.warn(
            f"{source} has {has}: prompts will go to the model as they are; "
            "give a template with --chat-template if it was trained on conversations",
            stacklevel=2,
        )
    return default, named


def _found(source: Path, given: Path | None) -> Iterator[tuple[Path, str, str]]:
    """(place, name, text) of every template, the ones that count first."""
    if given is not None:
        yield given, DEFAULT, _text(given)
    if (source / _FILE).is_file():
        yield source / _FILE, DEFAULT, _text(source / _FILE)
    for file in sorted((source / _FOLDER).glob("*.jinja")):
        yield file, file.stem, _text(file)
    for configuration in _CONFIGURATIONS:
        file = source / configuration
        if file.is_file():
            for name, text in _templates_in(file):
                yield file, name, text


def _templates_in(file: Path) -> Iterator[tuple[str, str]]:
    try:
        data = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{file} is not JSON: {error}") from None
    templates: Any = data.get("chat_template") if isinstance(data, dict) else None
    if isinstance(templates, str):
        templates = {DEFAULT: templates}
    elif isinstance(templates, list):  # several, as tokenizer_config.json has them
        pairs = [(t.get("name"), t.get("template")) if isinstance(t, dict) else (None, None) for t in templates]
        templates = dict(pairs)
    if templates is None:
        return
    if not isinstance(templates, dict) or not all(isinstance(t, str) for pair in templates.items() for t in pair):
        raise ExportError(f"{file}: chat_template is no text and no named texts; repair it, or leave it out")
    yield from templates.items()


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{file} cannot be read: {error}") from None
