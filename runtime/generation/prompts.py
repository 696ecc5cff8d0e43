"""From what a caller gives to token ids: a text, a conversation, or the ids themselves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, TypeGuard

from tokenizers import Tokenizer

from via_sd.contract.chat_template import ChatTemplate, Message, chat_template
from via_sd.errors import RequestError
from via_sd.runtime.generation.chat import ControlTokens

#: What can be generated from: a text, a conversation, or token ids.
Prompt = str | Sequence[Message] | Sequence[int]


def are_several(prompt: Any) -> TypeGuard[Sequence[Prompt]]:
    """Whether `prompt` is a list of prompts: texts, conversations or lists of token ids, not messages or ids."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        return False
    return all(isinstance(each, Sequence) for each in prompt)


#: The template for conversations with tools, where a model has several.
_TOOL_USE = "tool_use"
#: Characters of a prompt that can possibly fit the KV buffers: so many, and so many for each of their positions. A
#: longer one is refused before anything reads it.
_CHARACTERS, _CHARACTERS_PER_POSITION = 1_000_000, 64
_EMPTY = "the prompt is empty; give it at least one character"


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How a prompt is read.

    Attributes:
        raw: take a text as it is, without the chat template.
        add_special_tokens: put the tokens around a raw text that the tokenizer puts there (BOS). By default they are
            added unless the text begins with BOS already. The chat template writes those of a conversation.
        sanitize_control_tokens: take control tokens in the caller's text (`<|im_start|>`, say) as text. By default they
            are text in a conversation and control tokens in a raw text, which was rendered elsewhere.
        chat_template: the name of one of the model's templates, or the Jinja text of another.
        chat_template_kwargs: further variables of the template, such as `enable_thinking`.
        tools: JSON schemas of functions that the model may call.
        documents: texts that the model may quote, {"title": …, "text": …}.
        add_generation_prompt: end a conversation where the assistant's answer begins.
        continue_final_message: end a conversation within its final message, so that the model goes on with it.
    """

    raw: bool = False
    add_special_tokens: bool | None = None
    sanitize_control_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        for name in ("raw", "add_special_tokens", "sanitize_control_tokens", "add_generation_prompt"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and getattr(type(self), name) is None):
                raise RequestError(f"{name} is {value!r}, wanted true or false")
        if not isinstance(self.continue_final_message, bool):
            raise RequestError(f"continue_final_message is {self.continue_final_message!r}, wanted true or false")
        if self.chat_template is not None and not isinstance(self.chat_template, str):
            raise RequestError(f"chat_template is {self.chat_template!r:.60}, wanted a name or the text of a template")
        kwargs = self.chat_template_kwargs
        if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
            raise RequestError(f"chat_template_kwargs is {kwargs!r:.60}, wanted values by name")

    @property
    def for_conversations(self) -> list[str]:
        """Names of the options given that concern conversations alone."""
        about_texts = ("raw", "add_special_tokens", "sanitize_control_tokens")
        return [f.name for f in fields(self) if f.name not in about_texts and getattr(self, f.name) != f.default]


PROMPT_OPTIONS = tuple(field.name for field in fields(PromptOptions))


class PromptEncoder:
    """Encodes prompts for one model.

    Args:
        tokenizer: the model's.
        reload: makes another of the same, see `ControlTokens`.
        described: the manifest's `tokenizer`.
        vocab_size: logits per row of the verifier.
        capacity: positions the KV buffers hold.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reload: Callable[[], Tokenizer],
        described: Mapping[str, Any],
        vocab_size: int,
        capacity: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._special_tokens: dict[str, str] = described["special_tokens"]
        self._default: str | None = described["chat_template"]
        self._named: dict[str, str] = described.get("chat_templates", {})
        self._vocab_size, self._capacity = vocab_size, capacity
        self._control = ControlTokens(tokenizer, reload, frozenset(map(int, described["eos_token_ids"])))
        self._warned = False

    @property
    def has_chat_template(self) -> bool:
        """Whether a conversation needs no template of the caller's."""
        return self._default is not None

    def encode(self, prompt: Prompt, options: PromptOptions) -> list[int]:
        """Token ids of `prompt`.

        Raises:
            RequestError: a prompt that is empty, of another type, or too long for the KV buffers, or options that do
                not fit it.
        """
        if isinstance(prompt, str):
            tokens = self._text(prompt, options)
        elif not isinstance(prompt, (list, tuple)) or not _alike(prompt):
            raise RequestError(
                'the prompt is neither a text nor a list of messages, {"role": "…", "content": "…"}, nor one of token '
                f"ids, but {prompt!r:.60}"
            )
        elif not prompt:
            raise RequestError(_EMPTY)
        elif isinstance(prompt[0], Mapping):
            tokens = self._conversation(prompt, options)
        else:
            tokens = self._ids(prompt, options)
        if not tokens:
            raise RequestError("the prompt has no tokens; give it at least one character")
        room = self._capacity - 1
        if len(tokens) > room:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, the KV buffers take {room} (max_seq_len {self._capacity}, one "
                "kept for the answer); shorten it, or export with a larger --max-seq-len"
            )
        return tokens

    def _ids(self, prompt: Sequence[Any], options: PromptOptions) -> list[int]:
        if given := options.for_conversations:
            raise RequestError(f"{given[0]} concerns conversations, and the prompt is token ids; leave it out")
        for position, token in enumerate(prompt):
            if not 0 <= token < self._vocab_size:
                raise RequestError(f"token {position} of the prompt is {token}, wanted 0 to {self._vocab_size - 1}")
        return [int(token) for token in prompt]

    def _text(self, text: str, options: PromptOptions) -> list[int]:
        if not text:
            raise RequestError(_EMPTY)
        self._check_length(text)
        if not options.raw and (self.has_chat_template or options.chat_template is not None):
            return self._conversation([{"role": "user", "content": text}], options)
        if given := options.for_conversations:
            why = "the prompt is raw" if options.raw else "this model has no chat template"
            raise RequestError(f"{given[0]} concerns conversations, and {why}; leave it out")
        if not options.raw and not self._warned:
            self._warned = True
            warnings.warn("this model has no chat template: prompts go to it as they are", stacklevel=2)
        special = options.add_special_tokens
        if special is None:
            bos = self._special_tokens.get("bos_token")
            special = not (bos and text.startswith(bos))
        marked = self._control.mark(text) if options.sanitize_control_tokens else text
        return self._encoded(marked, special)

    def _conversation(self, messages: Sequence[Message], options: PromptOptions) -> list[int]:
        if options.raw:
            raise RequestError("a raw prompt takes a text, not a conversation; leave out raw")
        template = self._template(options)
        sanitize = options.sanitize_control_tokens is not False
        text = template.render(
            messages,
            tools=options.tools,
            documents=options.documents,
            arguments=options.chat_template_kwargs,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            mark=self._control.mark if sanitize else str,
        )
        self._check_length(text)
        return self._encoded(text, bool(options.add_special_tokens))

    def _template(self, options: PromptOptions) -> ChatTemplate:
        wanted = options.chat_template
        source = self._default if wanted is None else self._named.get(wanted, wanted)
        if wanted is None and options.tools is not None:
            source = self._named.get(_TOOL_USE, source)
        if source is None:
            names = f"; it has templates called {', '.join(sorted(self._named))}" if self._named else ""
            raise RequestError(
                "this model has no chat template, so it takes a text and no conversation: give one with "
                f"chat_template{names}"
            )
        return chat_template(source, self._special_tokens)

    def _encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        tokens = self._tokens_of(text, add_special_tokens)
        largest = max(tokens, default=0)
        if largest >= self._vocab_size:
            raise RequestError(
                f"the prompt has token {largest} ({self._tokenizer.id_to_token(largest)!r}), which the tokenizer knows "
                f"and the model, of {self._vocab_size} tokens, does not; leave it out"
            )
        return tokens

    def _tokens_of(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return self._control.encode(text, add_special_tokens=add_special_tokens)
        except (RequestError, KeyboardInterrupt, SystemExit):
            raise
        except (TypeError, UnicodeEncodeError):  # what the library says of a text that has no UTF-8
            raise RequestError("the prompt holds half a surrogate pair, which is no character; remove it") from None
        except BaseException as error:  # noqa: BLE001 - panics of a library in Rust are no Exception
            raise RequestError(f"the tokenizer cannot read the prompt ({error}); export the bundle again") from None

    def _check_length(self, text: str) -> None:
        limit = max(_CHARACTERS, _CHARACTERS_PER_POSITION * self._capacity)
        if len(text) > limit:
            raise RequestError(
                f"the prompt has {len(text)} characters, which the {self._capacity} tokens of the KV buffers cannot "
                "hold; shorten it, or export with a larger --max-seq-len"
            )


def _alike(prompt: Sequence[Any]) -> bool:
    """Whether all of it is messages, or all of it is whole numbers."""
    return all(isinstance(each, Mapping) for each in prompt) or all(
        isinstance(each, Integral) and not isinstance(each, bool) for each in prompt
    )
