"""What the runtime needs of a tokenizer: its files, every way a text can end, the chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from via_sd.errors import ExportError
from via_sd.export.writer.tokenizer import export_tokenizer

BOS, EOS, PAD = 256, 257, 258  # of the tests' byte-level tokenizer


@pytest.fixture
def source(checkpoint_of, tmp_path) -> Path:
    directory = Path(shutil.copytree(checkpoint_of("llama"), tmp_path / "source"))
    (directory / "generation_config.json").unlink()
    return directory


@pytest.fixture
def target(tmp_path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


pytestmark = pytest.mark.filterwarnings("ignore:.*has no chat template:UserWarning")


def change(file: Path, **entries: Any) -> None:
    data = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**data, **entries}))


def test_a_text_ends_where_any_configuration_says_so(source, target):
    """The model's, the generation's and the tokenizer's token; chat models often name different ones."""
    change(source / "generation_config.json", eos_token_id=[10, 11])
    assert export_tokenizer(source, target, {"eos_token_id": 12})["eos_token_ids"] == [10, 11, 12, EOS]


def test_the_tokenizers_own_end_token_counts_alone(source, target):
    assert export_tokenizer(source, target, {})["eos_token_ids"] == [EOS]


def test_a_special_token_may_be_written_as_an_object(source, target):
    change(source / "tokenizer_config.json", eos_token={"content": "<pad>", "lstrip": False})
    facts = export_tokenizer(source, target, {})
    assert facts["eos_token_ids"] == [PAD]
    assert facts["special_tokens"]["eos_token"] == "<pad>"
    assert facts["special_tokens"]["bos_token"] == "<s>"


def test_a_model_that_never_ends_is_refused(source, target):
    change(source / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ExportError, match="names no end-of-sequence token"):
        export_tokenizer(source, target, {"eos_token_id": None})


TEMPLATE = "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", TEMPLATE),
        ("chat_template.json", {"chat_template": TEMPLATE}),
        ("processor_config.json", {"processor_class": "X", "chat_template": TEMPLATE}),
        ("additional_chat_templates/default.jinja", TEMPLATE),
        ("tokenizer_config.json", {"chat_template": TEMPLATE}),
        ("tokenizer_config.json", {"chat_template": {"default": TEMPLATE}}),
        ("tokenizer_config.json", {"chat_template": [{"name": "chat", "template": TEMPLATE}]}),
    ],
    ids=str,
)
def test_the_chat_template_is_found_wherever_it_is_kept(file, content, source, target):
    (source / file).parent.mkdir(exist_ok=True)
    if isinstance(content, str):
        (source / file).write_text(content, encoding="utf-8")
    else:
        change(source / file, **content)
    assert export_tokenizer(source, target, {})["chat_template"] == TEMPLATE


def test_the_templates_own_file_counts_before_configurations_and_a_given_one_before_all(source, target, tmp_path):
    change(source / "tokenizer_config.json", chat_template="from the configuration")
    (source / "chat_template.jinja").write_text("from its own file: ü", encoding="utf-8")
    assert export_tokenizer(source, target, {})["chat_template"] == "from its own file: ü"
    (tmp_path / "given.jinja").write_text("given", encoding="utf-8")
    assert export_tokenizer(source, target, {}, tmp_path / "given.jinja")["chat_template"] == "given"


@pytest.mark.parametrize("template", ["{{ messages[-1].content }}\ud800", "{{ messages[-1].content }}{{ '\\ud800' }}"])
def test_a_template_that_writes_half_a_surrogate_pair_is_refused(template, source, target):
    change(source / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ExportError, match=r"half a surrogate pair.*--chat-template"):
        export_tokenizer(source, target, {})


def test_several_templates_keep_their_names(source, target):
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "the default"}]
    change(source / "tokenizer_config.json", chat_template=several)
    found = export_tokenizer(source, target, {})
    assert (found["chat_template"], found["chat_templates"]) == ("the default", {"tool_use": "tools"})


def test_a_model_without_a_default_template_is_warned_of(source, target):
    with pytest.warns(UserWarning, match="has no chat template: prompts will go to the model as they are"):
        assert export_tokenizer(source, target, {})["chat_template"] is None
    several = [{"name": "tool_use", "template": "tools"}, {"name": "rag", "template": "documents"}]
    change(source / "tokenizer_config.json", chat_template=several)
    with pytest.warns(UserWarning, match=r"has no default among its chat templates \(rag, tool_use\)"):
        assert export_tokenizer(source, target, {})["chat_template"] is None


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}", "{% frobnicate %}", [{"name": "x"}], {"a": 1}, 3], ids=str
)
def test_a_template_that_is_none_is_refused_with_the_file_it_is_in(template, source, target):
    change(source / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ExportError, match=r"tokenizer_config\.json: .*chat.template"):
        export_tokenizer(source, target, {})


def test_the_files_are_copied_as_they_are(source, target):
    (source / "chat_template.jinja").write_text("{{ messages }}")
    export_tokenizer(source, target, {})
    assert sorted(p.name for p in target.iterdir()) == [
        "chat_template.jinja", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    for file in target.iterdir():
        assert file.read_bytes() == (source / file.name).read_bytes()


def test_a_tokenizer_that_needs_its_own_python_is_refused(source, target):
    (source / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match=r"has no tokenizer\.json; load it with transformers\.AutoTokenizer and save"):
        export_tokenizer(source, target, {})


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"type": "Nonesuch"}}'])
def test_a_broken_tokenizer_is_refused(text, source, target):
    (source / "tokenizer.json").write_text(text)
    with pytest.raises(ExportError, match=r"tokenizer\.json cannot be read"):
        export_tokenizer(source, target, {})


def test_a_broken_configuration_is_refused(source, target):
    (source / "tokenizer_config.json").write_text("{")
    with pytest.raises(ExportError, match=r"tokenizer_config\.json is not JSON"):
        export_tokenizer(source, target, {})


CHATML = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<pad>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def test_a_text_ends_where_the_template_ends_a_turn(source, target):
    change(source / "tokenizer_config.json", chat_template=CHATML)
    assert export_tokenizer(source, target, {})["eos_token_ids"] == [EOS, PAD]


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "ends an assistant's turn without a token of its own"),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML,
            "no system, with a system message and several turns",
        ),
    ],
)
def test_what_a_template_does_not_do_is_said(template, match, source, target):
    change(source / "tokenizer_config.json", chat_template=template)
    with pytest.warns(UserWarning, match=match):
        export_tokenizer(source, target, {})


def test_a_template_that_renders_no_conversation_is_refused(source, target):
    change(source / "tokenizer_config.json", chat_template="{{ 1 // 0 }}")
    with pytest.raises(
        ExportError, match="with one message of a user; repair it, or give another with --chat-template"
    ):
        export_tokenizer(source, target, {})


def test_tokens_beyond_the_vocabulary_are_said(source, target):
    with pytest.warns(UserWarning, match=r"1 tokens beyond the model's vocabulary of 258 \('<pad>' is 258\)"):
        export_tokenizer(source, target, {"vocab_size": 258})


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"suppress_tokens": [3], "min_new_tokens": 4}, "asks for min_new_tokens, suppress_tokens, which a bundle"),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, "sampling with --temperature 0.6 --top-k 20"),
        ({"repetition_penalty": 1.8}, "--repetition-penalty 1.8"),
    ],
)
def test_generation_defaults_that_a_bundle_does_not_have_are_said(settings, match, source, target):
    change(source / "generation_config.json", **settings)
    with pytest.warns(UserWarning, match=match):
        export_tokenizer(source, target, {})


@pytest.mark.parametrize("value", ["x", 1.5, [True], [-1], {"a": 1}])
def test_an_end_token_that_is_no_id_is_refused(value, source, target):
    change(source / "generation_config.json", eos_token_id=value)
    with pytest.raises(ExportError, match="wanted a token id or a list of them"):
        export_tokenizer(source, target, {})


def test_a_tokenizer_that_panics_is_refused(source, target):
    described = json.loads((source / "tokenizer.json").read_text())
    described["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (source / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(ExportError, match=r"tokenizer\.json cannot be read"):
        export_tokenizer(source, target, {})
