"""`generate`: the JSON object scripts rely on, text on stdout, one message for what cannot be served."""

from __future__ import annotations

import json

import pytest

from tests.support.command_line import invoke, refused, run_script
from via_sd.runtime import load_bundle
from via_sd.runtime.generation.policy_file import measured_files
from via_sd.tools.commands.console import out

GENERATE_KEYS = {"text", "token_ids", "tiers", "finish_reason", "prompt_tokens", "seed", "stats"}


STATS_KEYS = {
    "mode", "emitted_tokens", "rounds", "drafted_tokens", "evaluated_tokens", "accepted_tokens", "rejection_rate",
    "mean_accepted_length", "tier_counts", "escalations", "escalation_rate", "draft_calls", "slim_calls",
    "full_calls", "full_tokens", "checked_by_full", "divergence", "time_ms", "ttft_ms", "tokens_per_s",
}  # fmt: skip


@pytest.mark.parametrize("mode", ["plain", "speculative", "cascade", "routed", "auto"])
def test_generate_prints_one_json_object_with_the_agreed_keys(mode, tiny_bundle):
    result = invoke("generate", tiny_bundle, "--prompt", "abc abc abc", "--mode", mode, "--max-new-tokens", 20,
                    "--ignore-eos", "--json")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""
    data = json.loads(result.stdout)
    assert set(data) == GENERATE_KEYS
    assert set(data["stats"]) >= STATS_KEYS
    assert len(data["token_ids"]) == len(data["tiers"]) == data["stats"]["emitted_tokens"] == 20
    assert set(data["tiers"]) <= {"draft", "slim", "full"}
    assert data["finish_reason"] == "length"
    assert data["prompt_tokens"] > 0
    assert data["stats"]["mode"] == ("speculative" if mode == "auto" else mode)
    assert set(data["stats"]["divergence"]) == {"checked", "disagreed", "rate"}
    assert set(data["stats"]["time_ms"]) == {"prefill", "draft", "slim", "full", "wait", "host", "total"}
    assert data["stats"]["tier_counts"] == {t: data["tiers"].count(t) for t in ("draft", "slim", "full")}


def test_the_installed_script_says_what_the_command_in_process_says(tiny_bundle):
    arguments = ("generate", tiny_bundle, "--prompt", "xyz", "--temperature", 0.8, "--seed", 5, "--max-new-tokens", 12,
                 "--json")  # fmt: skip
    outside = run_script(*arguments)
    assert (outside.returncode, outside.stderr) == (0, "")
    first, second = json.loads(outside.stdout), json.loads(invoke(*arguments).stdout)
    assert first["token_ids"] == second["token_ids"]
    assert first["seed"] == second["seed"] == 5


def test_logprobs_come_on_request(tiny_bundle):
    result = invoke("generate", tiny_bundle, "--prompt", "abc", "--max-new-tokens", 5, "--logprobs", 3, "--json")
    data = json.loads(result.stdout)
    assert set(data) == GENERATE_KEYS | {"logprobs"}
    assert len(data["logprobs"]) == len(data["token_ids"])
    for token, entry in zip(data["token_ids"], data["logprobs"], strict=True):
        assert entry["top"][0] == [token, pytest.approx(entry["logprob"])]  # greedy: the likeliest one
        assert len(entry["top"]) == 3


@pytest.mark.parametrize("raw", [True, False])
def test_the_chat_template_is_used_unless_raw(raw, tiny_bundle):
    result = invoke("generate", tiny_bundle, "--prompt", "abc", "--max-new-tokens", 1, "--json", *["--raw"] * raw)
    assert json.loads(result.stdout)["prompt_tokens"] == 3 if raw else json.loads(result.stdout)["prompt_tokens"] > 10


def test_text_goes_to_stdout_as_it_is_and_the_summary_to_stderr(tiny_bundle):
    arguments = ("generate", tiny_bundle, "--prompt", "abc abc", "--max-new-tokens", 40, "--ignore-eos",
                 "--temperature", 1.5, "--seed", 3)  # fmt: skip
    text = json.loads(invoke(*arguments, "--json").stdout)["text"]
    shown = run_script(*arguments)
    assert shown.returncode == 0
    assert shown.stdout == text + "\n"
    assert "40 tokens" in shown.stderr
    assert "tok/s" in shown.stderr
    assert shown.stderr.rstrip().endswith("length")


def test_tabs_and_runs_of_blanks_reach_stdout_unchanged(capsys):
    """Code is made of them."""
    from via_sd.tools.commands.generate import show

    text = "if x:\n\treturn  [y]   # [bold] :smile: " + "long " * 60 + "\n"
    show([(text[:9], "slim"), (text[9:], "full")])
    assert capsys.readouterr().out == text


def test_a_stop_text_ends_the_answer(tiny_bundle):
    free = json.loads(
        invoke("generate", tiny_bundle, "--prompt", "q", "--max-new-tokens", 30, "--ignore-eos", "--json").stdout
    )
    stop = free["text"][4:6]
    result = invoke("generate", tiny_bundle, "--prompt", "q", "--max-new-tokens", 30, "--ignore-eos", "--json",
                    "--stop", stop, "--stop", "never said by this model")  # fmt: skip
    data = json.loads(result.stdout)
    assert data["text"] == free["text"][: free["text"].index(stop)]
    assert data["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--prompt", ""], ["the prompt is empty"]),
        (["--prompt", "a" * 300], ["the prompt has", "the KV buffers take 255", "--max-seq-len"]),
        (["--prompt", "x", "--mode", "turbo"], ["mode 'turbo' is not known", "plain, speculative, cascade, routed"]),
        (["--prompt", "x", "--max-new-tokens", "0"], ["max_new_tokens is 0, wanted 1 or more"]),
        (["--prompt", "x", "--gamma", "0"], ["gamma is 0, wanted 1 or more"]),
        (["--prompt", "x", "--max-lag", "0"], ["max_lag is 0"]),
        (["--prompt", "x", "--temperature", "-1"], ["temperature"]),
        (["--prompt", "x", "--temperature", "nan"], ["temperature"]),
        (["--prompt", "x", "--top-p", "1.5"], ["top_p"]),
        (["--prompt", "x", "--top-k", "-1"], ["top_k"]),
        (["--prompt", "x", "--min-p", "2"], ["min_p"]),
        (["--prompt", "x", "--repetition-penalty", "0"], ["repetition_penalty"]),
        (["--prompt", "x", "--alpha1", "7"], ["alpha1"]),
        (["--prompt", "x", "--max-divergence", "2"], ["max_divergence"]),
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_a_request_that_cannot_be_served_is_one_message(options, says, as_json, tiny_bundle):
    refused(invoke("generate", tiny_bundle, *options, *["--json"] * as_json), *says)


def test_a_mode_without_its_tier_is_refused(tiny_checkpoint, tmp_path):
    assert invoke("export", tiny_checkpoint, "--out", tmp_path / "b", "--no-check", "--max-seq-len", 64).exit_code == 0
    for mode in ("routed", "cascade"):
        refused(invoke("generate", tmp_path / "b", "--prompt", "x", "--mode", mode), mode, "--mask")
    assert invoke("generate", tmp_path / "b", "--prompt", "x", "--max-new-tokens", 2).exit_code == 0


def test_ctrl_c_during_a_text_ends_its_line(tiny_bundle, monkeypatch):
    def show(pieces: object) -> None:
        out.print("text", end="")
        raise KeyboardInterrupt

    monkeypatch.setattr("via_sd.tools.commands.generate.show", show)
    result = invoke("generate", tiny_bundle, "--prompt", "abc", "--raw")
    assert (result.exit_code, result.stdout) == (130, "text\n")
    assert "error: interrupted" in result.stderr


def test_generate_gives_several_answers_over_one_prefill(tiny_bundle):
    command = ("generate", tiny_bundle, "--prompt", "abcdefgh", "--raw", "--temperature", 1.0, "--seed", 3, "--n", 2)
    found = json.loads(invoke(*command, "--max-new-tokens", 8, "--json").stdout)["completions"]
    assert [each["seed"] for each in found] == [3, 4]
    assert [each["stats"]["reused_prefix_tokens"] for each in found] == [0, 6]
    shown = invoke(*command, "--max-new-tokens", 8)
    assert "-- answer 2, seed 4" in shown.stderr


def test_generate_takes_rules_and_grammars(tiny_bundle, tmp_path):
    pytest.importorskip("llguidance", reason="needs the grammar extra")
    (tmp_path / "schema.json").write_text('{"enum": ["river", "sea"]}')
    command = ("generate", tiny_bundle, "--prompt", "Name one.")
    assert invoke(*command, "--json-schema", tmp_path / "schema.json").stdout.strip() in ('"river"', '"sea"')
    assert invoke(*command, "--choice", "salty", "--choice", "fresh").stdout.strip() in ("salty", "fresh")
    biased = invoke(*command, "--logit-bias", "65=100", "--logit-bias", "66=-100", "--max-new-tokens", 3, "--json")
    assert json.loads(biased.stdout)["token_ids"] == [65, 65, 65]
    stopped = invoke(*command, "--logit-bias", "65=100", "--stop-token-ids", 65, "--json")
    assert json.loads(stopped.stdout)["token_ids"] == [65]
    refused(invoke(*command, "--json-schema", tmp_path / "none.json"), "--json-schema", "No such file")
    refused(invoke(*command, "--logit-bias", "65"), "logit_bias is", "wanted numbers by token id")
    refused(invoke(*command, "--regex", "("), "regex cannot be followed")
    refused(invoke(*command, "--sampling-defaults"), "generation_config.json recommends none")


def test_generate_says_when_routed_did_not_ask_slim(tiny_bundle, tmp_path):
    command = ("generate", tiny_bundle, "--prompt", "abc abc abc", "--raw", "--mode", "routed", "--max-new-tokens", 6)
    asked = invoke(*command, "--router", "paper", "--ignore-eos")
    assert "slim was never asked" not in asked.stderr
    facts = {
        "format": "via-sd-policy", "version": 2, "machine": {}, "auto": {"mode": "plain"}, "exact": "plain",
        "files": measured_files(load_bundle(tiny_bundle), "onnxruntime"),
        "costs": {"full": {"1": 1.0, "2": 1.1}, "slim": {"1": 0.6, "2": 0.7}, "draft": None},
        "router": {"max_divergence": 0.1, "margins": {"0.1": 1.0}},
    }  # fmt: skip
    (tmp_path / "policy.json").write_text(json.dumps(facts))
    shut = invoke(*command, "--router", "calibrated", "--max-divergence", "0.05", "--policy", tmp_path / "policy.json")
    assert shut.exit_code == 0
    assert "slim was never asked: nothing was calibrated for a divergence of 0.05" in shut.stderr
    shown = json.loads(invoke("inspect", tmp_path / "policy.json", "--json").stdout)
    assert (shown["kind"], shown["router"]) == ("policy", facts["router"])


def test_a_text_that_fills_the_buffers_says_so(tiny_bundle):
    full = invoke("generate", tiny_bundle, "--prompt", "x" * 250, "--raw", "--ignore-eos", "--max-new-tokens", "50")
    message = "the KV buffers are full (256 tokens, 250 of them the prompt's): export with a larger --max-seq-len"
    assert message in " ".join(full.stderr.split())
    short = invoke("generate", tiny_bundle, "--prompt", "x", "--raw", "--ignore-eos", "--max-new-tokens", "5")
    assert "KV buffers" not in short.stderr
