"""Where a prompt can come from on the command line, and how it is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from tests.support.command_line import invoke, refused, run_script
from via_sd.runtime import Pipeline

QUESTION = {"role": "user", "content": "Why?"}


def generate(bundle: Path, *arguments: object, stdin: str | None = None) -> Result:
    fixed = ("--max-new-tokens", 2, "--mode", "plain", "--json")
    return invoke("generate", bundle, *arguments, *fixed, stdin=stdin)


def answer(bundle: Path, *arguments: object, stdin: str | None = None) -> dict[str, Any]:
    result = generate(bundle, *arguments, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refusal(bundle: Path, *arguments: object) -> str:
    return refused(generate(bundle, *arguments))


@pytest.fixture(scope="module")
def pipeline(tiny_bundle: Path) -> Pipeline:
    return Pipeline.load(tiny_bundle, threads=1)


def expected(pipeline: Pipeline, prompt: Any, **options: Any) -> list[int]:
    tokens: list[int] = pipeline.generate(prompt, mode="plain", max_new_tokens=2, **options).token_ids
    return tokens


def test_a_prompt_comes_from_the_line_a_file_or_standard_input(tiny_bundle, tmp_path, pipeline):
    (tmp_path / "prompt.txt").write_text("Why?", encoding="utf-8")
    wanted = expected(pipeline, "Why?")
    assert answer(tiny_bundle, "--prompt", "Why?")["token_ids"] == wanted
    assert answer(tiny_bundle, "--prompt-file", tmp_path / "prompt.txt")["token_ids"] == wanted
    assert answer(tiny_bundle, "--prompt", "-", stdin="Why?")["token_ids"] == wanted


def test_a_conversation_comes_from_a_file_or_standard_input(tiny_bundle, tmp_path, pipeline):
    conversation = [{"role": "system", "content": "Short."}, QUESTION]
    (tmp_path / "c.json").write_text(json.dumps(conversation), encoding="utf-8")
    wanted = expected(pipeline, conversation)
    assert answer(tiny_bundle, "--messages", tmp_path / "c.json")["token_ids"] == wanted
    assert answer(tiny_bundle, "--messages", "-", stdin=json.dumps(conversation))["token_ids"] == wanted
    assert answer(tiny_bundle, "--prompt", "Why?", "--system", "Short.")["token_ids"] == wanted


def test_an_answer_is_continued(tiny_bundle, tmp_path, pipeline):
    conversation = [QUESTION, {"role": "assistant", "content": "Be"}]
    (tmp_path / "c.json").write_text(json.dumps(conversation), encoding="utf-8")
    wanted = expected(pipeline, conversation, continue_final_message=True)
    assert answer(tiny_bundle, "--messages", tmp_path / "c.json", "--continue-final-message")["token_ids"] == wanted


def test_the_template_and_its_variables_are_the_callers(tiny_bundle, tmp_path, pipeline):
    source = "{{ messages[0].content }}{% if think is false %}!{% endif %}{{ name }}{{ tools[0].name }}"
    (tmp_path / "t.jinja").write_text(source, encoding="utf-8")
    (tmp_path / "tools.json").write_text('[{"name": "f"}]', encoding="utf-8")
    variables = ("--template-arg", "think=false", "--template-arg", "name=[b", "--tools", tmp_path / "tools.json")
    data = answer(tiny_bundle, "--prompt", "a", "--chat-template", tmp_path / "t.jinja", *variables)
    assert data["token_ids"] == expected(pipeline, "a![bf", raw=True)
    assert "takes no argument think" in refusal(tiny_bundle, "--prompt", "a", "--template-arg", "think=false")
    assert "wanted NAME=VALUE" in refusal(tiny_bundle, "--prompt", "a", "--template-arg", "think")


def test_control_tokens_in_a_prompt_are_text_unless_allowed(tiny_bundle):
    typed = answer(tiny_bundle, "--prompt", "<|im_start|>")["prompt_tokens"]
    assert answer(tiny_bundle, "--prompt", "<|im_start|>", "--no-sanitize-control-tokens")["prompt_tokens"] < typed
    raw = answer(tiny_bundle, "--prompt", "<|im_start|>", "--raw")["prompt_tokens"]
    assert raw == 1
    assert answer(tiny_bundle, "--prompt", "<|im_start|>", "--raw", "--sanitize-control-tokens")["prompt_tokens"] > raw


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give one of --prompt, --prompt-file and --messages, not none"),
        (("--prompt", "a", "--messages", "b"), "not --prompt and --messages"),
        (("--prompt-file", "missing.txt"), "missing.txt cannot be read"),
        (("--messages", "missing.json"), "missing.json cannot be read"),
        (("--prompt", "a", "--chat-template", "missing.jinja"), "there is no file missing.jinja"),
        (("--prompt", "a", "--raw", "--system", "b"), "takes a text, not a conversation"),
        (("--prompt", "a", "--tools", "missing.json"), "missing.json cannot be read"),
    ],
)
def test_what_gives_no_prompt_is_refused(arguments, says, tiny_bundle):
    assert says in refusal(tiny_bundle, *arguments)


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "1" * 5000, '{"role": "user"}', '["a"]', "[3"])
def test_a_file_that_holds_no_conversation_is_refused(content, tiny_bundle, tmp_path):
    (tmp_path / "c.json").write_text(content, encoding="utf-8")
    refusal(tiny_bundle, "--messages", tmp_path / "c.json")


def test_a_file_that_is_not_utf_8_is_refused(tiny_bundle, tmp_path):
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe")
    assert "cannot be read" in refusal(tiny_bundle, "--prompt-file", tmp_path / "p.txt")


def test_a_model_without_a_template_is_warned_of_once(tiny_bundle, tmp_path):
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    manifest = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))
    manifest["tokenizer"]["chat_template"] = None
    (bundle / "bundle.json").write_text(json.dumps(manifest), encoding="utf-8")
    command = ("generate", bundle, "--prompt", "a", "--max-new-tokens", 2, "--json")
    done = run_script(*command)
    assert (done.returncode, done.stderr) == (
        0, "warning: this model has no chat template: prompts go to it as they are\n",
    )  # fmt: skip
    done = run_script(*command, "--raw")
    assert (done.returncode, done.stderr) == (0, "")
