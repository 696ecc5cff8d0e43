"""`bench`: the comparison and its files, and one message for what cannot be measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command_line import invoke, refused


@pytest.fixture
def prompts(tmp_path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "abc abc abc", "bucket": "copy"}\n\n{"prompt": "what is this?"}\n')
    return file


def test_bench_compares_modes_with_plain_decoding_in_the_same_run(tiny_bundle, prompts, tmp_path):
    result = invoke("bench", tiny_bundle, "--prompts", prompts, "--modes", "speculative,routed", "--max-new-tokens", 8,
                    "--repeats", 2, "--json", tmp_path / "figures.json")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures) == {"plain", "speculative", "routed"}
    for by_bucket in figures.values():
        assert set(by_bucket) == {"all", "copy", "default"}
        for values in by_bucket.values():
            speed = values["tokens_per_s"]
            assert 0 < speed["min"] <= speed["median"] <= speed["max"]
            assert sum(values["tiers"].values()) == pytest.approx(1)
    assert figures["plain"]["all"]["over_plain"] == pytest.approx({"median": 1, "min": 1, "max": 1})
    assert figures["speculative"]["all"]["equal_to_plain"] == 1
    for text in ("exact", "approximate", "copy", "default"):
        assert text in result.stdout


def test_bench_says_what_its_rows_went_by(tiny_bundle, prompts, tmp_path):
    result = invoke("bench", tiny_bundle, "--prompts", prompts, "--modes", "auto,routed", "--max-new-tokens", 4,
                    "--repeats", 1, "--set", "alpha2=0.9", "--set", "max_divergence=0.25",
                    "--report", tmp_path / "page.html")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    said = "routed, router adaptive, alpha1 0.5, alpha2 0.9, divergence at most 25.0%"
    assert f"auto: speculative\nrouted: {said}\n" in result.stdout
    assert said in (tmp_path / "page.html").read_text(encoding="utf-8")
    rows = [line.split("│")[1:3] for line in result.stdout.splitlines() if line.startswith("│")]
    assert {mode.strip(): output.strip() for mode, output in rows} == {
        "plain": "exact", "auto": "exact", "routed": "approximate",
    }  # fmt: skip


@pytest.mark.parametrize("option", ["--json", "--report"])
def test_bench_refuses_a_place_it_could_not_write_before_it_measures(option, tiny_bundle, prompts, tmp_path):
    command = ("bench", tiny_bundle, "--prompts", prompts, "--max-new-tokens", 4, "--repeats", 1, option)
    refused(invoke(*command, tmp_path / "no/file"), "there is no directory", "make it first")
    refused(invoke(*command, tmp_path), "is a directory; name a file in it")
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


@pytest.mark.parametrize("option", ["presence_penalty=0.5", "temperature=0.7", "min_new_tokens=2"])
def test_a_bench_report_leaves_out_a_prediction_that_cannot_be_made(option, tiny_bundle, prompts, tmp_path):
    result = invoke("bench", tiny_bundle, "--prompts", prompts, "--modes", "speculative", "--max-new-tokens", 4,
                    "--repeats", 1, "--threads", 1, "--set", option, "--report", tmp_path / "report.html")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Speed over plain" in page
    assert "Prediction" not in page


def test_a_bench_report_is_a_page_with_the_table_and_where_it_was_measured(tiny_bundle, prompts, tmp_path):
    result = invoke("bench", tiny_bundle, "--prompts", prompts, "--modes", "speculative", "--max-new-tokens", 8,
                    "--repeats", 1, "--threads", 1, "--report", tmp_path / "report.html")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    for text in ("speculative", "exact", "copy", "cores", "1 threads", "2 prompts, 8 tokens, 1 repeats", "fp32"):
        assert text in page, text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read prompts"),
        ("", "has no prompts"),
        ("{prompt", "line 1 is not JSON"),
        ('{"prompt": "x"}\n{"text": "y"}', "line 2: wanted"),
        ('{"prompt": ""}', "line 1: wanted"),
        ('["x"]', "line 1: wanted"),
        ("\xff", "cannot read prompts"),
    ],
)
def test_a_broken_prompt_file_is_one_message(content, says, tiny_bundle, tmp_path):
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_bytes(content.encode("latin-1"))
    refused(invoke("bench", tiny_bundle, "--prompts", file), says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--modes", "plain,turbo"], "modes turbo are not known"),
        (["--repeats", 0], "--repeats 1 or more"),
        (["--max-new-tokens", 1], "--max-new-tokens must be 2 or more"),
        (["--set", "alpha2"], "--set is 'alpha2', wanted NAME=VALUE"),
        (["--set", "warmth=1"], "--set: no option is called 'warmth'; options are mode, max_new_tokens, temperature"),
        (["--set", "top_k=many"], "--set: top_k is 'many', wanted a whole number"),
        (["--set", "top_k=-1"], "top_k is -1, wanted 0 or more"),
        (["--set", "mode=plain"], "--set mode: use --modes"),
    ],
)
def test_a_bench_that_cannot_be_run_is_one_message(options, says, tiny_bundle, prompts):
    refused(invoke("bench", tiny_bundle, "--prompts", prompts, *options), says)
