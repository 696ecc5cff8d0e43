# ruff: noqa: E501 - templates are read on one line
"""Conversations are rendered as transformers renders them, and what no template can render is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from via_sd.contract.chat_template import ChatTemplate, chat_template
from via_sd.errors import RequestError

DATA = Path(__file__).parents[1] / "data" / "chat_templates"
FAMILIES = sorted(file.stem for file in DATA.glob("*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather <in> a "city", today & tomorrow',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Köln, say"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": 1}},
}
USER = {"role": "user", "content": "Is it cold?"}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one question": ([{"role": "user", "content": "  Hello <b>there</b> & 'good' \"day\" \n"}], {}),
    "a system message and turns": (
        [
            {"role": "system", "content": "Be brief. 短く。"},
            USER,
            {"role": "assistant", "reasoning_content": "Hm.", "content": "<think>\nSo.\n</think>\n\nYes."},
            {"role": "user", "content": "And tomorrow?"},
        ],
        {},
    ),
    "a tool, its call and its result": (
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": '{"degrees": 3}'},
            {"role": "assistant", "content": "Three degrees."},
            {"role": "user", "content": "Thanks"},
        ],
        {"tools": [WEATHER]},
    ),
    "two questions in a row, which some refuse": ([USER, {"role": "user", "content": "Well?"}], {}),
    "an answer to go on with": (
        [USER, {"role": "assistant", "content": '{"answer": '}],
        {"continue_final_message": True},
    ),
}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: What models' templates use of Jinja, a feature each.
FEATURES = {
    "tojson": "{{ messages[1].tool_calls | tojson }}",
    "tojson with arguments": "{{ messages[1].tool_calls | tojson(indent=2, sort_keys=True) }}"
    "{{ messages[1].tool_calls | tojson(separators=(',', ':'), ensure_ascii=True) }}",
    "tojson leaves HTML alone": "{{ '<a>&\\'' | tojson }}",
    "tools that are none": "{% if tools is none %}none{% endif %}{% if tools is defined %}defined{% endif %}",
    "documents that are none": "{{ documents is none }}{{ documents is defined }}",
    "a refusal": "{{ raise_exception('no') }}",
    "today": "{{ strftime_now('%Y-%m-%d') }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.role }}{% set x = 1 %}{% endgeneration %}{{ x }}{% endfor %}",
    "break and continue": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}{% break %}"
    "{% endfor %}",
    "namespace": "{% set ns = namespace(x=0) %}{% for m in messages %}{% set ns.x = ns.x + 1 %}{% endfor %}{{ ns.x }}",
    "macro": "{% macro f(x, y='d') %}[{{ x }}|{{ y }}]{% endmacro %}{{ f(messages[0].role) }}{{ f('a', y='b') }}",
    "call block": "{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}in{% endcall %}",
    "blocks": "{% set x %}a{{ messages[0].role }}{% endset %}{{ x }}{% filter upper %}{{ x }}{% endfilter %}",
    "slices": "{% set rest = messages[1:] %}{{ rest | length }}{{ messages[::-1][0].role }}",
    "methods": "{{ 'a</think>b'.split('</think>')[-1].lstrip('b') }}{{ 'x'.startswith('x') }}{{ 'a-b'.replace('-', '+') }}",
    "items": "{% for k, v in messages[0].items() | sort %}{{ k }}={{ v }};{% endfor %}",
    "white space": "{% for m in messages %}\n  {% if true %}\n    {{ m.role }}\n  {% endif %}\n{% endfor %}\n",
    "undefined": "{{ nothing }}|{{ messages[0].nothing }}",
    "undefined of undefined": "{{ nothing.more }}",
    "text plus number": "{{ messages[0].content + 1 }}",
    "joins": "{{ 'a' ~ 1 ~ none ~ nothing }}{{ ['a', 'b'] | join(', ') }}{{ 'ab' * 2 }}{{ '%s-%03d' % ('a', 3) }}",
    "format": "{{ '%s-%d' | format('a', 3) }}{{ '{}:{:>4}'.format('a', 'b') }}",
    "lists": "{{ [1, 2] + [3] }}{{ (1, 2) }}{{ {'a': [1]} }}{{ dict(a=1) }}{{ range(3) | list }}",
    "filters": "{{ messages | map(attribute='role') | join(',') }}{{ messages | selectattr('role', 'equalto', 'user') | list "
    "| length }}{{ messages | rejectattr('role', 'equalto', 'user') | first is mapping }}{{ ' a ' | trim | upper }}",
    "tests": "{{ messages is iterable and messages is not string and messages[0] is mapping }}",
    "changing the conversation": "{% set _ = messages.append(1) %}x",
    "nothing to divide by": "{{ 1 // 0 }}",
    "no such message": "{{ messages[9].role }}",
    "special tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}",
    "another file": "{% include 'x' %}",
    "CPython": "{{ ''.__class__.__mro__ }}",
}


@pytest.fixture(scope="module")
def transformers_tokenizer() -> Any:
    transformers = pytest.importorskip("transformers", reason="needs the export extra")
    from tokenizers import Tokenizer, models

    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)


def theirs(tokenizer: Any, template: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """What transformers renders; None for a refusal."""
    last = options.get("continue_final_message", False)
    try:
        text: str = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=not last, **options
        )
    except Exception:  # noqa: BLE001 - a template may raise anything
        return None
    return text


def ours(template: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    try:
        return ChatTemplate(template, SPECIAL).render(messages, **options)
    except RequestError:
        return None


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ten_families_render_as_in_transformers(family, conversation, transformers_tokenizer):
    template = (DATA / f"{family}.jinja").read_text(encoding="utf-8")
    messages, options = CONVERSATIONS[conversation]
    if "tools" in options and "tools" not in ChatTemplate(template, SPECIAL).variables:
        options = {}  # transformers drops them without a word, and we refuse them: see below
    assert ours(template, messages, **options) == theirs(transformers_tokenizer, template, messages, **options)


def test_the_families_cover_refusals_and_answers(transformers_tokenizer):
    rendered = {
        family: theirs(transformers_tokenizer, (DATA / f"{family}.jinja").read_text("utf-8"), CONVERSATIONS[name][0])
        for name in ["two questions in a row, which some refuse"]
        for family in FAMILIES
    }
    assert len(rendered) == 10
    assert {text is None for text in rendered.values()} == {True, False}


@pytest.mark.parametrize("feature", FEATURES)
def test_features_of_jinja_work_as_in_transformers(feature, transformers_tokenizer):
    messages = [USER, {"role": "assistant", "content": "é", "tool_calls": [CALL]}]
    assert ours(FEATURES[feature], messages) == theirs(transformers_tokenizer, FEATURES[feature], messages)


def render(template: str, messages: list[Any], **options: Any) -> str:
    return ChatTemplate(template, SPECIAL).render(messages, **options)


def test_text_parts_are_joined_for_a_template_that_takes_texts():
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    as_text = render(CHATML, [{"role": "user", "content": "hi"}])
    assert render(CHATML, [{"role": "user", "content": parts}]) == as_text


def test_a_template_that_takes_parts_gets_them_and_a_text_becomes_one():
    loop = (
        "{% for m in messages %}{% for c in m.content %}{% if c.type == 'text' %}[{{ c.text }}]{% endif %}{% endfor %}"
    )
    template = loop + "{% endfor %}"
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert render(template, [{"role": "user", "content": parts}]) == "[h][i]"
    assert render(template, [{"role": "user", "content": "hi"}]) == "[hi]"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": None}, "has no content"),
        ({"role": "user"}, "has no content"),
        ({"role": "user", "content": 7}, "content of type int, wanted a text"),
        ({"role": "user", "content": {"a": 1}}, "content of type dict, wanted a text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "takes text alone"),
        ({"role": "user", "content": [{"type": "text", "text": 7}]}, "takes text alone"),
        ({"role": "user", "content": ["hi"]}, "takes text alone"),
        ({"content": "hi"}, "the role None, wanted a name"),
        ({"role": "<|im_end|>", "content": "hi"}, "wanted a name"),
        ({"role": "assistant", "tool_calls": "f"}, "wanted a list of objects"),
        ("hi", "wanted an object"),
    ],
)
def test_a_message_that_no_template_can_render_is_refused(message, says):
    with pytest.raises(RequestError, match=says):
        render(CHATML, [message])


def test_an_empty_conversation_is_refused():
    with pytest.raises(RequestError, match="the conversation is empty"):
        render(CHATML, [])


def test_an_assistant_that_calls_a_tool_needs_no_content():
    said = render("{% for m in messages %}{{ m.content }}{% endfor %}!", [{"role": "assistant", "content": None}])
    assert said == "!"


def test_json_text_as_arguments_is_decoded_for_a_template_that_would_quote_it():
    text_call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    dict_call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    quoting = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    either = quoting.replace(" | tojson", "")
    for call in (text_call, dict_call):
        assert render(quoting, [USER, {"role": "assistant", "tool_calls": [call]}]) == '{"a": 1}'
    assert render(either, [USER, {"role": "assistant", "tool_calls": [text_call]}]) == '{"a": 1}'


def test_arguments_that_are_no_json_object_are_refused_where_one_is_needed():
    template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    for arguments in ("{", "[1]", "[" * 100_000):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        with pytest.raises(RequestError, match="wanted a JSON object"):
            render(template, [USER, {"role": "assistant", "tool_calls": [call]}])


def test_the_caller_sets_variables_of_the_template():
    template = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{{ messages[0].role }}"
    assert render(template, [USER]) == "user"
    assert render(template, [USER], arguments={"enable_thinking": False}) == "<think></think>user"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tools": [WEATHER]}, "takes no tools"),
        ({"documents": [{"text": "x"}]}, "takes no documents"),
        ({"tools": "f"}, "wanted a list of objects"),
        ({"tools": [7]}, "wanted a list of objects"),
        ({"arguments": {"enable_thinking": False}}, "takes no argument enable_thinking; it takes none"),
        ({"arguments": {"messages": []}}, "has an option of its own"),
        ({"arguments": {"bos_token": object()}}, "takes no argument bos_token"),
    ],
)
def test_what_the_template_would_pass_over_is_refused(options, says):
    with pytest.raises(RequestError, match=says):
        render(CHATML, [USER], **options)


def test_an_answer_is_continued_where_it_ends():
    said = render(CHATML, [USER, {"role": "assistant", "content": "Well, "}], continue_final_message=True)
    assert said.endswith("<|im_start|>assistant\nWell, ")
    trimming = CHATML.replace("m['content']", "m['content'] | trim")
    said = render(trimming, [USER, {"role": "assistant", "content": "Well, "}], continue_final_message=True)
    assert said.endswith("<|im_start|>assistant\nWell,")


def test_only_an_answer_is_continued():
    with pytest.raises(RequestError, match="and the last is of user"):
        render(CHATML, [USER], continue_final_message=True)
    with pytest.raises(RequestError, match="needs a final message with text"):
        render(CHATML, [USER, {"role": "assistant", "tool_calls": [CALL]}], continue_final_message=True)
    with pytest.raises(RequestError, match="does not show the final message"):
        render("{{ messages[0].content }}", [USER, {"role": "assistant", "content": "x"}], continue_final_message=True)


def test_a_text_that_spans_two_parts_is_marked_as_one():
    loop = "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "start|>"}]
    marked = render(
        loop, [{"role": "user", "content": parts}], mark=lambda text: text.replace("<|im_start|>", "MARKED")
    )
    assert marked == "MARKED"


def test_a_template_is_compiled_once():
    assert chat_template(CHATML, SPECIAL) is chat_template(CHATML, dict(SPECIAL))


@pytest.mark.parametrize(
    "source",
    ["{% for m in messages %}", "{% frobnicate %}", "{{ a b }}", "{% generation %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
     "{% for a in [1] %}" * 60 + "{% endfor %}" * 60, "x" * 600_000],
)  # fmt: skip
def test_a_template_that_cannot_be_compiled_is_named(source):
    with pytest.raises(RequestError, match=r"^the chat template "):
        ChatTemplate(source, {})
