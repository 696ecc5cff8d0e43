"""Chat templates, rendered as transformers renders them but without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from via_sd.errors import RequestError

Message = Mapping[str, Any]


def render_chat(template: str, messages: Sequence[Message], special_tokens: Mapping[str, str]) -> str:
    """The prompt for `messages` ({"role": …, "content": …}), ending where the assistant's answer begins.

    Raises:
        RequestError: the template refuses the conversation, or is broken.
    """
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=True, **special_tokens
        )
    except (TemplateError, TypeError) as error:  # a template that adds a number to a text, say
        raise RequestError(f"the chat template cannot render this conversation: {error}") from None


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
