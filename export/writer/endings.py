"""Where a text ends: the tokens that a model's files name, and the token with which its chat template ends a turn.

Chat models are often published with another end-of-sequence token than the one that ends a turn; a generation that
stops at the first alone runs on into turns that it invents.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from via_sd.contract.chat_template import ChatTemplate
from via_sd.errors import ExportError, RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Stands for an answer, which no template changes.
_ANSWER = "7f3a answer 7f3a"
_USER, _ASSISTANT = {"role": "user", "content": "Hello."}, {"role": "assistant", "content": _ANSWER}
_SYSTEM = {"role": "system", "content": "Be brief."}


def token_ids(value: Any) -> list[int]:
    """Token ids as configurations write them: none, one, or a list.

    Raises:
        ExportError: something else.
    """
    if value is None:
        return []
    found = value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in found):
        raise ExportError(f"eos_token_id is {str(value)[:60]!r}, wanted a token id or a list of them; correct it")
    return [int(each) for each in found]


def end_of_turn(
    source: Path, template: str | None, special_tokens: Mapping[str, str], tokenizer: Tokenizer
) -> int | None:
    """The token with which `template` ends an assistant's turn, None if there is no template or no such token.

    The template is tried on two conversations: one message, and several turns under a system message. What it does not
    take is said in a warning.

    Raises:
        ExportError: a template that cannot render one message of a user.
    """
    if template is None:
        return None
    chat = ChatTemplate(template, special_tokens)
    try:
        chat.render([_USER])
    except RequestError as error:
        raise ExportError(
            f"{source}: {error}, with one message of a user; repair it, or give another with --chat-template"
        ) from None
    try:
        chat.render([_SYSTEM, _USER, _ASSISTANT, _USER])
    except RequestError as error:
        _warn(f"{source}: {error}, with a system message and several turns")
    try:
        text = chat.render([_USER, _ASSISTANT], add_generation_prompt=False)
    except RequestError as error:
        _warn(f"{source}: {error}, with an answer; how its turns end is not known")
        return None
    before, _, after = text.rpartition(_ANSWER)
    added = tokenizer.get_added_tokens_decoder()
    try:
        ids = tokenizer.encode(after, add_special_tokens=False).ids
    except (TypeError, UnicodeEncodeError):  # what the library says of a text that has no UTF-8
        raise ExportError(
            f"{source}: the chat template writes half a surrogate pair, which is no character; repair it, or give "
            "another with --chat-template"
        ) from None
    found = [index for index in ids if index in added]
    if not before or not found:
        _warn(
            f"{source}: the chat template ends an assistant's turn without a token of its own; an answer ends only at "
            "the end-of-sequence tokens"
        )
        return None
    return int(found[0])


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)
