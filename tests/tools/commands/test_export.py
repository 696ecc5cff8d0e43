"""`export`: what it writes, and that nothing is left of what cannot be exported or is interrupted."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import SCRIPT, heed_interrupts, invoke, refused, run_script
from via_sd.masks import Mask


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
