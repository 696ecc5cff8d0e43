"""`inspect`: the facts of bundles and masks, as JSON and for people."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.command_line import invoke, run_script
from tests.support.tiny import HIDDEN
from via_sd.masks import Mask, write_mask
from via_sd.runtime import load_bundle
from via_sd.runtime.engines.backends import open_engines


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
