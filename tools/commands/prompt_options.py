"""What `generate` answers: a prompt from the command line, a file or standard input, or a conversation."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from via_sd.runtime import Prompt
from via_sd.tools.commands.console import CommandError
from via_sd.tools.commands.generation_options import split_settings
from via_sd.tools.commands.option_groups import option, with_group

_STDIN = "-"


@dataclass(frozen=True)
class GivenPrompt:
    """A prompt, and how it is to be read (fields of `PromptOptions` by name)."""

    prompt: Prompt
    options: dict[str, Any] = field(default_factory=dict)


_Prompt = Annotated[
    Optional[str],  # noqa: UP045 - typer reads it
    typer.Option(help="Prompt, through the model's chat template unless --raw; `-` reads it from standard input."),
]
_PromptFile = Annotated[Optional[Path], typer.Option(help="File with the prompt (UTF-8).")]  # noqa: UP045
_Messages = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help='File with a conversation, [{"role": "user", "content": "…"}, …]; `-` is standard input.'),
]
_System = Annotated[Optional[str], typer.Option(help="System message in front of the prompt.")]  # noqa: UP045
_ChatTemplate = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Jinja file, or the name of one of the model's templates.", show_default="the model's default"),
]
_TemplateArg = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        metavar="NAME=VALUE", help="Variable of the chat template, such as enable_thinking=false; repeatable."
    ),
]
_Tools = Annotated[Optional[Path], typer.Option(help="JSON file with the tools the model may call.")]  # noqa: UP045
_Documents = Annotated[Optional[Path], typer.Option(help="JSON file with documents to answer from.")]  # noqa: UP045
_Continue = Annotated[
    bool, typer.Option("--continue-final-message", help="Go on with the conversation's last message.")
]
_AddSpecialTokens = Annotated[
    Optional[bool],  # noqa: UP045
    typer.Option(help="Raw: put BOS in front.", show_default="unless the prompt begins with it"),
]
_Sanitize = Annotated[
    Optional[bool],  # noqa: UP045
    typer.Option(
        "--sanitize-control-tokens/--no-sanitize-control-tokens",
        help="Take control tokens in the prompt (`<|im_start|>`, say) as text.",
        show_default="as text, unless --raw",
    ),
]
_OPTIONS: dict[str, Any] = {
    "prompt": (_Prompt, None),
    "prompt_file": (_PromptFile, None),
    "messages": (_Messages, None),
    "system": (_System, None),
    "chat_template": (_ChatTemplate, None),
    "template_arg": (_TemplateArg, None),
    "tools": (_Tools, None),
    "documents": (_Documents, None),
    "continue_final_message": (_Continue, False),
    "add_special_tokens": (_AddSpecialTokens, None),
    "sanitize_control_tokens": (_Sanitize, None),
}


def read_prompt(
    *,
    prompt: str | None = None,
    prompt_file: Path | None = None,
    messages: Path | None = None,
    system: str | None = None,
    chat_template: str | None = None,
    template_arg: Sequence[str] | None = None,
    tools: Path | None = None,
    documents: Path | None = None,
    continue_final_message: bool = False,
    add_special_tokens: bool | None = None,
    sanitize_control_tokens: bool | None = None,
) -> GivenPrompt:
    """The prompt that these options give.

    Raises:
        CommandError: no prompt or several, or a file that cannot be read.
    """
    given = [flag for flag, value in (("--prompt", prompt), ("--prompt-file", prompt_file), ("--messages", messages))
             if value is not None]  # fmt: skip
    if len(given) != 1:
        raise CommandError(f"give one of --prompt, --prompt-file and --messages, not {' and '.join(given) or 'none'}")
    options = {
        "chat_template": _template(chat_template),
        "chat_template_kwargs": template_arguments(template_arg or ()) or None,
        "tools": _read_json(tools, "--tools") if tools else None,
        "documents": _read_json(documents, "--documents") if documents else None,
        "continue_final_message": continue_final_message,
        "add_special_tokens": add_special_tokens,
        "sanitize_control_tokens": sanitize_control_tokens,
    }
    if messages is not None:
        conversation = _read_json(messages, "--messages")
        if not isinstance(conversation, list) or not all(isinstance(message, dict) for message in conversation):
            raise CommandError(f'--messages {messages}: wanted a list, [{{"role": "user", "content": "…"}}, …]')
    else:
        text = _read(prompt_file, "--prompt-file") if prompt_file else prompt or ""
        if prompt == _STDIN:
            text = _read(Path(_STDIN), "--prompt")
        if system is None:
            return GivenPrompt(text, options)
        conversation = [{"role": "user", "content": text}]
    if system is not None:
        conversation = [{"role": "system", "content": system}, *conversation]
    return GivenPrompt(conversation, options)


def template_arguments(given: Sequence[str]) -> dict[str, Any]:
    """Variables of a chat template from `NAME=VALUE` texts: a value is JSON where it is, and a text otherwise."""
    values: dict[str, Any] = {}
    for name, text in split_settings(given, "--template-arg"):
        try:
            values[name] = json.loads(text)
        except (ValueError, RecursionError):
            values[name] = text
    return values


def _template(given: str | None) -> str | None:
    if given is None or not Path(given).is_file():
        if given is not None and ("/" in given or given.endswith(".jinja")):
            raise CommandError(f"--chat-template: there is no file {given}")
        return given
    return _read(Path(given), "--chat-template")


def _read(path: Path, flag: str) -> str:
    try:
        if str(path) == _STDIN:
            return sys.stdin.buffer.read().decode("utf-8")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{flag} {path} cannot be read: {error}") from None


def _read_json(path: Path, flag: str) -> Any:
    try:
        return json.loads(_read(path, flag))
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{flag} {path} is not JSON: {error}") from None


#: The parameter `given` of a command becomes the options above; it gets a `GivenPrompt`.
with_prompt_options = with_group("given", [option(name, *each) for name, each in _OPTIONS.items()], read_prompt)
