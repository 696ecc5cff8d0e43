"""The command line: what scripts rely on, and one clear message for everything that can go wrong."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.support.tiny import HIDDEN
from via_sd.masks import Mask, write_mask
from via_sd.runtime import Chunk, load_bundle
from via_sd.runtime.engines.backends import open_engines
from via_sd.runtime.generation.policy_file import measured_files
from via_sd.tools.commands.console import out
from via_sd.tools.commands.main import app

SCRIPT = Path(sys.executable).with_name("via-sd-export")

GENERATE_KEYS = {"text", "token_ids", "tiers", "finish_reason", "prompt_tokens", "seed", "stats"}
STATS_KEYS = {
    "mode", "emitted_tokens", "rounds", "drafted_tokens", "evaluated_tokens", "accepted_tokens", "rejection_rate",
    "mean_accepted_length", "tier_counts", "escalations", "escalation_rate", "draft_calls", "slim_calls",
    "full_calls", "full_tokens", "checked_by_full", "divergence", "time_ms", "ttft_ms", "tokens_per_s",
}  # fmt: skip


def invoke(*arguments: object) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run_script(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the installed console script, as a user does; line ends stay as they were printed."""
    done = subprocess.run(
        [str(SCRIPT), *map(str, arguments)], capture_output=True, check=False, env={**os.environ, **environment}
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def refused(result: Result | subprocess.CompletedProcess[str], *says: str) -> str:
    """Assert that a command ended with one message on stderr and exit code 2; the message."""
    code = result.exit_code if isinstance(result, Result) else result.returncode
    assert code == 2, (result.stdout, result.stderr)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert "Traceback" not in result.stderr
    for text in says:
        assert text in lines[0]
    return lines[0]


@pytest.fixture
def damaged(tiny_bundle, tmp_path) -> Path:
    """A copy of the bundle that a test may damage."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


# -- generate --------------------------------------------------------------------------------------------------------


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
    show(Chunk(text, [1], ["slim"]))
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


def test_a_bundle_that_is_not_there_is_refused(tmp_path):
    refused(run_script("generate", tmp_path / "nothing", "--prompt", "x"), "is no bundle", "via-sd-export export")
    refused(invoke("inspect", tmp_path / "nothing"), "does not exist")
    refused(invoke("inspect", tmp_path), "has no bundle.json")


def _truncate(bundle: Path) -> None:
    weights = bundle / "verifier/weights.data"
    os.truncate(weights, weights.stat().st_size - 4096)


def _flip_one_byte(bundle: Path) -> None:
    weights = bundle / "verifier/weights.data"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)


def _edit_manifest(**entries: Any) -> Callable[[Path], None]:
    def edit(bundle: Path) -> None:
        manifest = json.loads((bundle / "bundle.json").read_text())
        (bundle / "bundle.json").write_text(json.dumps({**manifest, **entries}))

    return edit


DAMAGES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "truncated weights": (_truncate, ["weights.data has", "wanted", "damaged"]),
    "one changed byte in the weights": (_flip_one_byte, ["weights.data is changed", "XXH3"]),
    "missing weights": (lambda b: (b / "verifier/weights.data").unlink(), ["weights.data is missing"]),
    "missing graph": (lambda b: (b / "verifier/model.onnx").unlink(), ["model.onnx is missing"]),
    "changed graph": (lambda b: (b / "verifier/slim.onnx").write_bytes(b"onnx"), ["slim.onnx has 4 bytes"]),
    "changed tokenizer": (lambda b: (b / "tokenizer.json").write_text("{}"), ["tokenizer.json has 2 bytes"]),
    "manifest cut short": (lambda b: os.truncate(b / "bundle.json", 900), ["bundle.json is corrupt"]),
    "empty manifest": (lambda b: os.truncate(b / "bundle.json", 0), ["bundle.json is corrupt"]),
    "manifest that is no text": (lambda b: (b / "bundle.json").write_bytes(b"\xff\xfe"), ["bundle.json is corrupt"]),
    "manifest of something else": (_edit_manifest(format="recipe"), ["is not a manifest of format via-sd-bundle"]),
    "manifest of the future": (_edit_manifest(version=99), ["bundle version 99", "reads 2"]),
    "manifest without files": (lambda b: (b / "bundle.json").write_text('{"format": "via-sd-bundle", "version": 2}'),
                               ["model is missing"]),
    "missing manifest": (lambda b: (b / "bundle.json").unlink(), ["has no bundle.json"]),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_bundle_is_refused_by_every_command_that_reads_it(damage, damaged):
    inflict, says = DAMAGES[damage]
    inflict(damaged)
    refused(invoke("generate", damaged, "--prompt", "x"), *says)
    refused(invoke("inspect", damaged, "--json"), *says)


def test_the_script_shows_no_traceback_either(damaged):
    _flip_one_byte(damaged)
    refused(run_script("generate", damaged, "--prompt", "x"), "weights.data is changed")


# -- export ----------------------------------------------------------------------------------------------------------


def test_export_writes_a_bundle_that_generate_and_inspect_read(tiny_checkpoint, tiny_masks, tmp_path):
    result = run_script("export", tiny_checkpoint, "--out", tmp_path / "b", "--mask", tiny_masks[0], "--drafter",
                        f"mask:{tiny_masks[1]}", "--precision", "int8", "--max-seq-len", 128)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert result.stderr == f"wrote {tmp_path / 'b'}\n"
    facts = json.loads(invoke("inspect", tmp_path / "b", "--json").stdout)
    assert (facts["precision"], facts["max_seq_len"], facts["slim"], facts["drafter"]) == ("int8", 128, "slim", "mask")
    data = json.loads(
        invoke(
            "generate", tmp_path / "b", "--prompt", "hello", "--mode", "routed", "--max-new-tokens", 8, "--json"
        ).stdout
    )
    assert data["stats"]["mode"] == "routed"


@pytest.fixture
def checkpoint(tiny_checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def test_sources_that_cannot_be_exported_are_one_message_and_nothing_is_left(checkpoint, tmp_path):
    out = tmp_path / "out" / "bundle"

    def fails(source: object, *says: str) -> None:
        refused(invoke("export", source, "--out", out), *says)
        assert not out.parent.exists() or not list(out.parent.iterdir())

    fails(tmp_path / "missing", "does not exist", "a GGUF file, a hub id, or a directory with an ONNX decoder")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(3))
    fails(tmp_path / "model.gguf", "damaged or cut short")
    (tmp_path / "notes.txt").write_text("not a model")
    fails(tmp_path / "notes.txt", "is no GGUF file")
    os.truncate(checkpoint / "model.safetensors", 5000)
    fails(checkpoint, "model.safetensors is damaged", "fetch it again")
    (checkpoint / "config.json").write_text('{"model_type": ')
    fails(checkpoint, "config.json is not JSON")


def test_a_gguf_quantisation_nobody_can_read_is_one_message(tmp_path):
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType.Q8_K
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    import numpy as np

    writer.add_tensor("blk.0.attn_q.weight", np.zeros((4, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    result = run_script("export", tmp_path / "model.gguf", "--out", tmp_path / "b")
    refused(result, "quantised as Q8_K", "cannot be dequantised")


def test_a_hub_id_without_a_network_is_one_message(tmp_path):
    result = run_script("export", "nobody/nothing", "--out", tmp_path / "b", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    refused(result, "nobody/nothing is no local path and cannot be fetched")


MASKS: dict[str, tuple[Any, list[str]]] = {
    "wrong length": ({"keep_mask": [True, False, True]}, ["is for 3 layers, the model (llama) has 6"]),
    "keeps nothing": ({"skip_layers": [0, 1, 2, 3, 4, 5]}, ["keeps nothing"]),
    "layer out of range": ({"skip_layers": [6]}, ["layers [6] do not exist"]),
    "bare array": ([1, 2], ["--mask-format keep|skip"]),
    "another model's": (
        Mask.from_layers([True] * 5 + [False]).to_json()
        | {"model": {"model_type": "llama", "num_layers": 6, "hidden_size": 64, "vocab_size": 1, "fingerprint": "f"}},
        ["made for another model", "fingerprint", "vocab_size is 1"],
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_wrong_mask_is_one_message(name, tiny_checkpoint, tmp_path):
    data, says = MASKS[name]
    (tmp_path / "mask.json").write_text(json.dumps(data))
    result = invoke("export", tiny_checkpoint, "--out", tmp_path / "b", "--mask", tmp_path / "mask.json", "--no-check")
    refused(result, *says)
    assert [p.name for p in tmp_path.iterdir()] == ["mask.json"]


def test_a_mask_that_is_no_json_is_one_message(tiny_checkpoint, tmp_path):
    (tmp_path / "mask.json").write_text("{keep")
    refused(invoke("export", tiny_checkpoint, "--out", tmp_path / "b", "--mask", tmp_path / "mask.json"), "is not JSON")
    refused(invoke("inspect", tmp_path / "mask.json"), "is not JSON")


def test_the_meaning_of_a_bare_array_is_taken_from_the_option(tiny_checkpoint, tmp_path):
    (tmp_path / "mask.json").write_text("[1, 2]")
    result = invoke("export", tiny_checkpoint, "--out", tmp_path / "b", "--mask", tmp_path / "mask.json",
                    "--mask-format", "skip", "--no-check", "--max-seq-len", 64)  # fmt: skip
    assert result.exit_code == 0, result.stderr
    tiers = json.loads(invoke("inspect", tmp_path / "b", "--json").stdout)["tiers"]
    assert {name: tier["skip_ratio"] for name, tier in tiers.items()} == {"full": 0.0, "mask": pytest.approx(1 / 3)}


def test_an_existing_out_is_refused(tiny_checkpoint, tmp_path):
    refused(invoke("export", tiny_checkpoint, "--out", tmp_path), "exists; remove it or choose another --out")


def test_an_out_that_cannot_be_made_is_refused(tiny_checkpoint, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    refused(invoke("export", tiny_checkpoint, "--out", tmp_path / "file" / "b"), "File exists", "/file")


@pytest.mark.parametrize(
    "arguments",
    [
        ["export"],
        ["export", "model"],
        ["export", "model", "--out", "b", "--precision", "fp16"],
        ["export", "model", "--out", "b", "--max-seq-len", "many"],
        ["generate", "bundle", "--prompt", "x", "--temperature", "hot"],
        ["inspect"],
        ["inspect", "bundle", "--nonsense"],
        ["no-such-verb"],
    ],
)
def test_bad_usage_is_exit_code_2_and_says_what_was_wrong(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage: " in result.stderr
    assert "Traceback" not in result.stderr


def test_help_names_every_verb_and_every_verb_has_help():
    text = run_script("--help").stdout
    for verb in ("export", "generate", "bench", "inspect", "demo"):
        assert verb in text
        shown = invoke(verb, "--help")
        assert shown.exit_code == 0
        assert "Usage:" in shown.stdout


def heed_interrupts() -> None:
    """Run in a new process: who starts these tests in the background has it ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_during_an_export_leaves_nothing(tiny_checkpoint, tiny_masks, tmp_path):
    """On a terminal, where progress is drawn: once it says that the graph is being built, the user has enough."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [str(SCRIPT), "export", str(tiny_checkpoint), "--out", str(tmp_path / "b"), "--mask", str(tiny_masks[0])],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        preexec_fn=heed_interrupts,
    )
    os.close(slave)
    seen = b""
    while b"building the graph" not in seen:
        seen += os.read(master, 4096)
    assert [p for p in tmp_path.iterdir() if p.name.startswith(".b.partial-")]
    process.send_signal(signal.SIGINT)
    while True:
        try:
            piece = os.read(master, 4096)
        except OSError:  # the terminal is gone with its last user
            break
        if not piece:
            break
        seen += piece
    os.close(master)
    assert process.wait() == 130, seen
    assert b"error: interrupted" in seen.replace(b"\x1b[1;31m", b"").replace(b"\x1b[0m", b"")
    assert b"Traceback" not in seen
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_during_a_text_ends_its_line(tiny_bundle, monkeypatch):
    def show(chunk: Chunk) -> None:
        out.print("text", end="")
        raise KeyboardInterrupt

    monkeypatch.setattr("via_sd.tools.commands.generate.show", show)
    result = invoke("generate", tiny_bundle, "--prompt", "abc", "--raw")
    assert (result.exit_code, result.stdout) == (130, "text\n")
    assert "error: interrupted" in result.stderr


# -- bench -----------------------------------------------------------------------------------------------------------


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


# -- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_describes_a_bundle_as_one_json_object(tiny_bundle):
    result = run_script("inspect", tiny_bundle, "--json")
    assert (result.returncode, result.stderr, result.stdout.count("\n")) == (0, "", 1)
    facts = json.loads(result.stdout)
    manifest = json.loads((tiny_bundle / "bundle.json").read_text())
    assert facts["kind"] == "bundle"
    assert facts["model"] == manifest["model"]
    assert facts["bytes"] == {name: (tiny_bundle / name).stat().st_size for name in manifest["files"]}
    held = sum(
        engine.new_buffers().keys_values(layer).nbytes
        for engine in open_engines(load_bundle(tiny_bundle), threads=1)
        if engine is not None
        for layer in range(engine.kv["num_layers"])
    )
    assert facts["kv_bytes"]["per_sequence"] == held
    assert facts["kv_bytes"]["per_token"] == held / facts["max_seq_len"]
    assert facts["tiers"]["slim"] == {
        "skip_ratio": pytest.approx(4 / 12),
        "sublayers_in": {"keep": 8, "skip": 4},
        "head": "keep",
        "added_bytes": 0,
        "added_share": 0.0,
    }


def test_inspect_says_what_a_tier_in_fewer_bits_adds(tiny_checkpoint, tmp_path):
    result = invoke("export", tiny_checkpoint, "--out", tmp_path / "b", "--slim-precision", "int8", "--no-check",
                    "--max-seq-len", 64)  # fmt: skip
    assert result.exit_code == 0, result.stderr
    tiers = json.loads(invoke("inspect", tmp_path / "b", "--json").stdout)["tiers"]
    slim, full = tiers["slim"], tiers["full"]["added_bytes"]
    assert (slim["sublayers_in"], slim["head"], slim["skip_ratio"]) == ({"int8": 12}, "int8", 0.0)
    # 32 weights in float32 become 32 bytes and a scale; neither the embedding nor norms and rotary tables are copied.
    embedding = 4 * HIDDEN * json.loads((tmp_path / "b/bundle.json").read_text())["verifier"]["vocab_size"]
    assert slim["added_bytes"] == pytest.approx((full - embedding) * 36 / 128, rel=0.1)
    assert slim["added_share"] == pytest.approx(slim["added_bytes"] / full)
    shown = " ".join(invoke("inspect", tmp_path / "b").stdout.split())
    assert "12 int8 of the sublayers, head int8; adds" in shown


def test_inspect_describes_a_mask_as_one_json_object(tmp_path):
    mask = Mask(("keep", "skip", "int8"), ("keep", "bridge", "bridge"), "int8", search={"seed": 4})
    write_mask(mask, tmp_path / "thin.json")
    facts = json.loads(invoke("inspect", tmp_path / "thin.json", "--json").stdout)
    assert facts == {
        "kind": "mask",
        "name": "thin",
        "layers": 3,
        "skip_ratio": pytest.approx(1 / 2),
        "skipped_attention": [1],
        "skipped_mlp": [1, 2],
        "bridges": [[3, 4], [5, 6]],
        "sublayers_in": {"keep": 2, "skip": 1, "bridge": 2, "int8": 1},
        "head": "int8",
        "model": None,
        "search": {"seed": 4},
    }


def test_inspect_shows_people_the_same_facts(tiny_bundle):
    result = invoke("inspect", tiny_bundle)
    assert result.exit_code == 0
    for text in ("bundle", "llama", "fp32", "256", "slim", "ngram"):
        assert text in result.stdout


def test_inspect_shows_people_how_much_a_tier_skips_and_what_lies_beside_the_bundle(tiny_bundle, tmp_path):
    shown = " ".join(invoke("inspect", tiny_bundle).stdout.split())
    assert "slim: 8 keep, 4 skip of the sublayers, head keep; adds 0.0 MB of weights (0% of full's)" in shown
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    (bundle / "policy").mkdir()
    (bundle / "policy" / "here.json").write_text("{}")
    facts = json.loads(invoke("inspect", bundle, "--json").stdout)
    assert (facts["engines"], facts["policies"]) == ([], ["here.json"])


# -- all of them -----------------------------------------------------------------------------------------------------


def test_the_version_is_that_of_the_package():
    result = run_script("--version")
    assert (result.returncode, result.stdout) == (0, f"via-sd-export {version('via-sd-export')}\n")


def test_a_library_of_an_extra_that_is_not_installed_is_one_message(tiny_bundle, monkeypatch):
    for imported in ("via_sd.export.sources.checkpoint", "via_sd.tools.validation.run"):
        monkeypatch.delitem(sys.modules, imported, raising=False)
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    message = "this needs onnx_ir, which is not installed: pip install 'via-sd-export[export]'"
    refused(invoke("validate", tiny_bundle, "--reference", "nowhere"), message)


def test_a_text_that_fills_the_buffers_says_so(tiny_bundle):
    full = invoke("generate", tiny_bundle, "--prompt", "x" * 250, "--raw", "--ignore-eos", "--max-new-tokens", "50")
    message = "the KV buffers are full (256 tokens, 250 of them the prompt's): export with a larger --max-seq-len"
    assert message in " ".join(full.stderr.split())
    short = invoke("generate", tiny_bundle, "--prompt", "x", "--raw", "--ignore-eos", "--max-new-tokens", "5")
    assert "KV buffers" not in short.stderr
