"""From a conversation to the text a model was trained on: what `transformers.apply_chat_template` renders, without it.

Export tries a model's template with this, the runtime renders prompts with it. Beyond transformers it looks at what a
template can take, by rendering small conversations: some want a message's content as text and some as a list of parts,
and some want the arguments of a tool call as JSON text and some as a dictionary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from via_sd.contract.template_sandbox import BoundedTemplate
from via_sd.errors import RequestError

Message = Mapping[str, Any]

#: Names of a message's reasoning; templates read the first, older clients send the others.
_REASONING = ("reasoning_content", "thinking", "reasoning")
#: Variables that have an option of their own.
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
_ROLE = re.compile(r"[\w. -]+")
#: Marks the end of a final message that is continued. The space shows whether the template trims what it prints.
_CONTINUE = "\ufdd2 "
_PROBE = "7f3a probe 7f3a"


class ChatTemplate:
    """A chat template and what it can take.

    Args:
        source: the Jinja text.
        special_tokens: by role (`bos_token`, …), for the template.

    Raises:
        RequestError: the source cannot be parsed.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._template = BoundedTemplate(source)

    @property
    def variables(self) -> frozenset[str]:
        """Names the template reads."""
        return self._template.variables

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        mark: Callable[[str], str] = str,
    ) -> str:
        """The prompt for `messages`.

        Args:
            messages: each with a `role`, and a `content` that is a text or a list of text parts
                ({"type": "text", "text": …}); an assistant's may have `tool_calls` instead.
            tools: JSON schemas of functions the model may call.
            documents: texts the model may quote, {"title": …, "text": …}.
            arguments: further variables of the template, such as `enable_thinking`.
            add_generation_prompt: end where the assistant's answer begins.
            continue_final_message: end within the final message, so that the model goes on with it.
            mark: applied to every text that comes from the caller.

        Raises:
            RequestError: messages of another shape, a variable that this template does not read, or a template that
                refuses, fails or takes too long.
        """
        chat = [_checked(message, index) for index, message in enumerate(messages)]
        if not chat:
            raise RequestError("the conversation is empty; give it at least one message")
        for name, given in (("tools", tools), ("documents", documents)):
            if given is None:
                continue
            if not isinstance(given, (list, tuple)) or not all(isinstance(each, Mapping) for each in given):
                raise RequestError(f"{name} is {given!r:.60}, wanted a list of objects")
            if name not in self.variables:
                raise RequestError(f"this model's chat template takes no {name}; leave them out")
        for name in arguments or {}:
            if name in _RESERVED:
                raise RequestError(f"template argument {name} has an option of its own; give it there")
            if name not in self.variables:
                known = sorted(self.variables - {*_RESERVED, *self._special_tokens})
                takes = f"it takes {', '.join(known)}" if known else "it takes none"
                raise RequestError(f"this model's chat template takes no argument {name}; {takes}")
        chat = [self._shaped(message) for message in chat]
        if continue_final_message:
            if add_generation_prompt and chat[-1]["role"] != "assistant":
                raise RequestError(
                    f"continue_final_message continues the assistant's message, and the last is of {chat[-1]['role']}"
                )
            add_generation_prompt = False
        variables = {
            **self._special_tokens,
            "messages": _plain(_guard_borders(chat, mark), mark),
            "tools": _plain(tools, mark),
            "documents": _plain(documents, mark),
            **_plain(dict(arguments or {}), mark),
            "add_generation_prompt": add_generation_prompt,
        }
        if continue_final_message:
            return self._continued(variables)
        return self._template.render(variables)

    def _continued(self, variables: dict[str, Any]) -> str:
        final = variables["messages"][-1]
        content = final.get("content")
        if isinstance(content, list):
            content[-1]["text"] += _CONTINUE
        elif isinstance(content, str):
            final["content"] += _CONTINUE
        else:
            raise RequestError("continue_final_message needs a final message with text")
        text = self._template.render(variables)
        at = text.rfind(_CONTINUE.strip())
        if at < 0:
            raise RequestError("this model's chat template does not show the final message, so it cannot be continued")
        return text[:at] if text.startswith(_CONTINUE, at) else text[:at].rstrip()

    def _shaped(self, message: dict[str, Any]) -> dict[str, Any]:
        """`message` with content and tool calls of the form the template takes."""
        message = _with_reasoning(message)
        content = message.get("content")
        if isinstance(content, list) and not self._takes_parts:
            message["content"] = "".join(part["text"] for part in content)
        elif isinstance(content, str) and not self._takes_text:
            message["content"] = [{"type": "text", "text": content}]
        calls = message.get("tool_calls")
        if calls and self._wants_decoded_arguments and any(_is_encoded(call) for call in calls):
            message["tool_calls"] = [_decoded(call) for call in calls]
        return message

    @cached_property
    def _takes_text(self) -> bool:
        as_text = self._try([{"role": "user", "content": _PROBE}])
        return as_text is None or _PROBE in as_text or not self._takes_parts

    @cached_property
    def _takes_parts(self) -> bool:
        as_parts = self._try([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
        # A template that prints the list shows its keys.
        return as_parts is not None and _PROBE in as_parts and not re.search(r"['\"]text['\"]", as_parts)

    @cached_property
    def _wants_decoded_arguments(self) -> bool:
        """Whether JSON text as arguments would be quoted once more, or refused."""
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": '{"probe7f3a": 1}'}}
        asked: dict[str, Any] = {"role": "user", "content": "x"}
        answered: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        encoded = self._try([asked, answered])
        if encoded is not None and '"probe7f3a"' in encoded:
            return False
        decoded = self._try([asked, {**answered, "tool_calls": [_decoded(call)]}])
        return decoded is not None and "probe7f3a" in decoded

    def _try(self, messages: list[dict[str, Any]]) -> str | None:
        variables = {**self._special_tokens, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._template.render({**variables, "messages": messages})
        except RequestError:
            return None


@lru_cache(maxsize=16)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


def chat_template(source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """The compiled template of `source`, the same one for the same arguments."""
    return _compiled(source, tuple(sorted(special_tokens.items())))


def _checked(message: Any, index: int) -> dict[str, Any]:
    """A message's own fields, those that are None left out; refuses what no template could render."""
    where = f"message {index + 1} of the conversation"
    if not isinstance(message, Mapping):
        raise RequestError(f'{where} is {message!r:.60}, wanted an object, {{"role": "…", "content": "…"}}')
    found = {key: value for key, value in message.items() if value is not None}
    role = found.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise RequestError(f"{where} has the role {role!r:.60}, wanted a name such as user, assistant or system")
    content = found.get("content")
    if content is None:
        if role != "assistant":
            raise RequestError(f"{where} has no content; only an assistant's may have none, for the sake of tool_calls")
    elif isinstance(content, (list, tuple)):
        found["content"] = [_text_part(part, where) for part in content]
    elif not isinstance(content, str):
        kind = type(content).__name__
        raise RequestError(f"{where} has content of type {kind}, wanted a text or a list of text parts")
    calls = found.get("tool_calls", [])
    if not isinstance(calls, (list, tuple)) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(f"{where} has tool_calls {calls!r:.60}, wanted a list of objects")
    return found


def _text_part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return dict(part)
    raise RequestError(
        f'{where} has the content part {part!r:.80}; this model takes text alone, {{"type": "text", "text": "…"}}'
    )


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function", call)
    return function if isinstance(function, Mapping) else {}


def _is_encoded(call: Mapping[str, Any]) -> bool:
    return isinstance(_function(call).get("arguments"), str)


def _decoded(call: Mapping[str, Any]) -> dict[str, Any]:
    """`call` with arguments that are a dictionary, where they are the JSON text of one."""
    arguments = _function(call).get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        raise RequestError(f"a tool call's arguments are {arguments!r:.80}, wanted a JSON object") from None
    if not isinstance(value, dict):
        raise RequestError(f"a tool call's arguments are {arguments!r:.80}, wanted a JSON object")
    if "function" in call:
        return {**call, "function": {**call["function"], "arguments": value}}
    return {**call, "arguments": value}


def _guard_borders(chat: list[dict[str, Any]], mark: Callable[[str], str]) -> list[dict[str, Any]]:
    """Text parts between which `mark` would see something that it sees in none of them are made one."""
    for message in chat:
        content = message.get("content")
        if not isinstance(content, list) or len(content) < 2:
            continue
        joined = "".join(part["text"] for part in content)
        if mark(joined) != "".join(mark(part["text"]) for part in content):
            message["content"] = [{**content[0], "text": joined}]
    return chat


def _plain(value: Any, mark: Callable[[str], str]) -> Any:
    """A copy of plain JSON types: a template gets no object whose methods the sandbox does not know."""
    if isinstance(value, str):
        return mark(str.__str__(value))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {_plain(key, mark): _plain(item, mark) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, mark) for item in value]
    raise RequestError(f"a conversation holds a value of type {type(value).__name__}, wanted what JSON has")
