"""Conversations to token ids: what the template writes are tokens, what a user writes stays text.

A user who types `<|im_start|>system` must not open a turn. llama.cpp keeps the two apart too; transformers does with
`sanitize_control_tokens`, and vLLM does not. Here the texts of a conversation are marked before the template sees them:
every control token in them gets a secret number in front and one behind. In the rendered text a control token between
these is the user's, and one without is the template's. Digits come through whatever a template does to a text: quoting
it as JSON, printing the dictionary it is in, upper case.

The prompt is then encoded in one piece, so that nothing changes at the edges: by a second tokenizer that knows control
tokens by secret names alone, into which those of the template are rewritten.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence

from tokenizers import AddedToken, Tokenizer

from via_sd.contract.chat_template import Message, chat_template
from via_sd.errors import RequestError

#: Around a control token in a caller's text: nobody knows them.
_START, _END = (f"{secrets.randbelow(10**24):024}" for _ in range(2))


def render_chat(template: str, messages: Sequence[Message], special_tokens: Mapping[str, str]) -> str:
    """The prompt for `messages` ({"role": …, "content": …}), ending where the assistant's answer begins.

    Raises:
        RequestError: the template refuses the conversation, or is broken.
    """
    return chat_template(template, special_tokens).render(messages)


class ControlTokens:
    """Tells a model's control tokens from text that looks like them.

    Args:
        tokenizer: the model's.
        reload: makes another of the same, when one is needed.
        also: ids of tokens that are control tokens even if the tokenizer does not mark them as special, such as those
            that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, reload: Callable[[], Tokenizer], also: frozenset[int]) -> None:
        self._tokenizer, self._reload = tokenizer, reload
        self._tokens = {
            token.content: index
            for index, token in tokenizer.get_added_tokens_decoder().items()
            if (token.special or index in also) and token.content.strip()
        }
        # What stands for unknown characters controls nothing, and comes of any text.
        self._tokens.pop(getattr(tokenizer.model, "unk_token", None) or "", None)
        names = "|".join(re.escape(name) for name in sorted(self._tokens, key=len, reverse=True)) or "(?!)"
        self._control = re.compile(names)
        self._marked = re.compile(f"{_START}({names}){_END}|{_START}|{_END}|({names})")
        self._literal: _LiteralTokenizer | None = None

    def mark(self, text: str) -> str:
        """`text` with its control tokens marked."""
        return self._control.sub(lambda found: f"{_START}{found[0]}{_END}", text)

    def encode(self, marked: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text in which marked control tokens are text, and others control tokens.

        Raises:
            RequestError: the tokenizer makes a control token of text whatever one does.
        """
        if _START not in marked and _END not in marked:
            return list(self._tokenizer.encode(marked, add_special_tokens=add_special_tokens).ids)
        if self._literal is None:
            self._literal = _LiteralTokenizer(self._reload(), self._tokens)
        names = self._literal.names
        text = self._marked.sub(lambda found: found[1] or (names[found[2]] if found[2] else ""), marked)
        return self._literal.encode(text, add_special_tokens=add_special_tokens)


class _LiteralTokenizer:
    """Encodes control tokens as text; what stands for one is its secret name in `names`."""

    def __init__(self, tokenizer: Tokenizer, tokens: Mapping[str, int]) -> None:
        described = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
        secret = secrets.token_hex(12)
        self.names = {text: f"\ufdd3{secret}{index}\ufdd3" for text, index in tokens.items()}
        # Those that were not special have to be, or they would be found in the text.
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in tokens if not described[text].special])
        tokenizer.encode_special_tokens = True
        tokenizer.add_tokens(
            [
                AddedToken(
                    name,
                    single_word=described[text].single_word,
                    lstrip=described[text].lstrip,
                    rstrip=described[text].rstrip,
                    normalized=described[text].normalized,
                    special=False,
                )
                for text, name in self.names.items()
            ]
        )
        self._tokenizer = tokenizer
        self._meant = {tokenizer.token_to_id(name): tokens[text] for text, name in self.names.items()}
        self._control = frozenset(tokens.values())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._control.intersection(ids):
            raise RequestError(
                "the prompt holds a control token as text, and this model's tokenizer makes the token of it all the "
                "same; leave it out, or allow it with sanitize_control_tokens=False"
            )
        if add_special_tokens:
            ids = self._tokenizer.encode(text, add_special_tokens=True).ids
        return [self._meant.get(index, index) for index in ids]
