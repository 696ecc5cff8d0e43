"""A bundle comes from elsewhere: names stay in its folder, values are possible, and what is wrong is one message."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.support.pipelines import table_pipeline
from tests.support.table_engine import TableEngine, hashed_logits
from via_sd.contract.file_entries import describe_file
from via_sd.contract.manifest import read_manifest
from via_sd.errors import LogitsError
from via_sd.runtime import BundleError, Pipeline, load_bundle


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def edit(bundle: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    manifest = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))
    change(manifest)
    (bundle / "bundle.json").write_text(json.dumps(manifest), encoding="utf-8")
    return bundle


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set the key at the dotted `path`."""

    def change(manifest: dict[str, Any]) -> None:
        *above, last = path.split(".")
        for key in above:
            manifest = manifest[key]
        manifest[last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("max_seq_len", 0),
        ("max_seq_len", 10**12),
        ("max_seq_len", True),
        ("precision", 4),
        ("verifier.vocab_size", -5),
        ("verifier.kv.num_layers", 0),
        ("verifier.kv.num_heads", 1.0),
        ("verifier.kv.dtype", "zz"),
        ("verifier.kv.past", "{layer:>3000000000}"),
        ("verifier.kv.parts", ["key"]),
        ("verifier.tiers.full.keep", []),
        ("verifier.tiers.slim.keep", [1, 0]),
        ("verifier.tiers.slim.added_bytes", -1),
        ("verifier.tiers.slim", "slim"),
        ("tokenizer.eos_token_ids", ["x"]),
        ("tokenizer.special_tokens", {"bos_token": 1}),
        ("slim", "../slim"),
        ("files", {"tokenizer.json": {"size": -1, "xxh3": ""}}),
        ("engines", 5),
        ("engines", {"tensorrt": {"manifest": "../engines.json", "sha256": ""}}),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_is_named(path: str, value: Any, bundle: Path) -> None:
    with pytest.raises(BundleError, match=r"bundle\.json is damaged: .*; export the bundle again") as error:
        read_manifest(edit(bundle, put(path, value)))
    assert path.split(".")[-1] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../b", "", ".", "a//b", "a\\b", "c:x", "a\x1b[2Jb", "x" * 300], ids=repr
)
def test_a_name_that_leads_elsewhere_is_refused(name: str, bundle: Path) -> None:
    whole = (bundle / "bundle.json").read_text(encoding="utf-8")

    def rename_tier(manifest: dict[str, Any]) -> None:
        tiers = manifest["verifier"]["tiers"]
        tiers[name] = tiers.pop("slim")
        manifest["slim"] = name

    for change in (
        put("verifier.graph", name),
        put("verifier.weights", name),
        lambda manifest: manifest["files"].update({name: {"size": 0, "xxh3": ""}}),
        rename_tier,
    ):
        (bundle / "bundle.json").write_text(whole, encoding="utf-8")
        with pytest.raises(BundleError, match="is damaged") as error:
            read_manifest(edit(bundle, change))
        assert "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("verifier.vocab_size", 300, "logits over"),
        ("verifier.kv.num_layers", 5, "12 KV buffers, and the manifest says 10"),
        ("verifier.kv.head_dim", 8, "heads of 16 numbers"),
        ("verifier.kv.dtype", "float16", r"tensor\(float\), and the manifest says .* float16"),
    ],
)
def test_what_the_manifest_says_of_a_graph_is_compared_with_it(path: str, value: Any, says: str, bundle: Path) -> None:
    with pytest.raises(BundleError, match=f"{says}.*export the bundle again"):
        Pipeline.load(edit(bundle, put(path, value)), threads=1)


def test_flags_are_as_many_as_the_graph_has_branches(bundle: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        for tier in manifest["verifier"]["tiers"].values():
            tier["keep"] = [True] * 9

    with pytest.raises(BundleError, match=r"branches, and the manifest says 9"):
        Pipeline.load(edit(bundle, change), threads=1)


def test_weights_that_the_manifest_does_not_list_are_not_run(bundle: Path) -> None:
    weights = bundle / "verifier" / "weights.data"
    weights.write_bytes(bytes(weights.stat().st_size))
    edit(bundle, lambda manifest: manifest["files"].pop("verifier/weights.data"))
    with pytest.raises(BundleError, match=r"does not list verifier/weights\.data"):
        Pipeline.load(bundle, threads=1)
    edit(bundle, put("verifier.weights", "verifier/model.onnx"))  # the graph reads its weights whatever is said here
    with pytest.raises(BundleError, match=r"weights\.data is not listed in the manifest"):
        Pipeline.load(bundle, threads=1)


@pytest.mark.parametrize("name", ["tokenizer.json", "verifier/weights.data", "verifier", "bundle.json"])
def test_a_link_is_not_followed_out_of_the_bundle(name: str, bundle: Path, tmp_path: Path) -> None:
    (bundle / name).rename(tmp_path / "elsewhere")
    (bundle / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match="link"):
        load_bundle(bundle)


@pytest.mark.parametrize("name", ["bundle.json", "tokenizer.json", "verifier/weights.data"])
def test_a_pipe_is_refused_and_not_waited_for(name: str, bundle: Path) -> None:
    (bundle / name).unlink()
    os.mkfifo(bundle / name)
    with pytest.raises(BundleError, match=r"regular file|is not a file"):
        load_bundle(bundle)


def test_a_policy_that_is_a_pipe_or_asks_for_the_impossible_is_a_warning(bundle: Path) -> None:
    from via_sd.runtime.generation.machine import this_machine
    from via_sd.runtime.generation.policy_file import FORMAT, VERSION, measured_files, policy_file

    file = policy_file(load_bundle(bundle), this_machine("onnxruntime", 1))
    file.parent.mkdir()
    os.mkfifo(file)
    with pytest.warns(UserWarning, match=r"no regular file.*defaults hold"):
        assert Pipeline.load(bundle, threads=1).policy is None
    file.unlink()
    costs = {"full": {"1": 1.0, "8": 2.0}, "slim": None, "draft": None}
    policy = {"format": FORMAT, "version": VERSION, "exact": "plain", "costs": costs}
    policy["files"] = measured_files(load_bundle(bundle), "onnxruntime")
    for auto in ({"mode": "plain", "gamma": -3}, {"mode": "plain", "nothing": 1}, {"mode": 10**400}):
        file.write_text(json.dumps({**policy, "auto": auto}))
        with pytest.warns(UserWarning, match=r"invalid policy.*defaults hold"):
            assert Pipeline.load(bundle, threads=1).policy is None
    for change in ({"draft": {}}, {"draft": False}, {"full": {"1": "1", "8": 2.0}}, {"slim": []}):
        file.write_text(json.dumps({**policy, "auto": {"mode": "plain"}, "costs": {**costs, **change}}))
        with pytest.warns(UserWarning, match=r"invalid policy \(costs\..* wanted .*defaults hold"):
            assert Pipeline.load(bundle, threads=1).policy is None


@pytest.mark.parametrize("threads", [0, -1, 10**6, 2**31])
def test_threads_that_no_machine_has_are_refused(threads: int, bundle: Path) -> None:
    with pytest.raises(BundleError, match=f"threads is {threads}, wanted 1 to"):
        Pipeline.load(bundle, threads=threads)


def test_weights_that_are_written_into_while_they_are_loaded_are_noticed(bundle: Path) -> None:
    pipeline = Pipeline.load(bundle, threads=1)
    wanted = pipeline.generate("a", max_new_tokens=3).token_ids
    weights = bundle / "verifier" / "weights.data"
    content = weights.read_bytes()
    moved = weights.with_name("other")
    moved.write_bytes(bytes(len(content)))
    moved.replace(weights)  # the safe way: what is loaded stays as it was
    assert pipeline.generate("a", max_new_tokens=3).token_ids == wanted
    weights.write_bytes(content)
    again = Pipeline.load(bundle, threads=1)
    with weights.open("r+b") as stream:
        stream.write(bytes(64))
    os.utime(weights, ns=(1, 1))
    with pytest.raises(BundleError, match=r"weights\.data was written into while it was loaded"):
        again.generate("a", max_new_tokens=3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mode", ["plain", "speculative", "routed", "cascade"])
def test_logits_that_are_no_numbers_end_the_sequence_and_its_buffers(mode: str, value: float, tmp_path: Path) -> None:
    sound = hashed_logits(26)

    def logits(tier: str, recent: tuple[int, ...], digest: int) -> np.ndarray:
        row = sound(tier, recent, digest).copy()
        if recent[-1] == 25:  # z
            row[3] = value
        return row

    engine = TableEngine(logits, 26)
    pipeline = table_pipeline(engine, tmp_path)
    options = {"mode": mode, "raw": True, "ignore_eos": True, "max_new_tokens": 5, "seed": 0}
    wanted = pipeline.generate("abc", **options).token_ids
    with pytest.raises(LogitsError, match="tier full of the verifier gave logits with NaN or Inf at position 3;"):
        pipeline.generate("abcz", **options)
    assert engine.released, "the buffers of the failed sequence were kept"
    assert pipeline.generate("abc", **options).token_ids == wanted


def test_a_weight_that_becomes_nan_at_run_time_leaves_later_requests_as_they_were(bundle: Path) -> None:
    """The bundle's own weights: the embedding of one token is NaN, as a damaged export would have it."""
    pipeline = Pipeline.load(bundle, threads=1)
    options = {"mode": "plain", "raw": True, "ignore_eos": True, "max_new_tokens": 8}
    poisoned = next(token for token in range(40, 80) if token not in pipeline.encode("hello", raw=True))
    graph = ir.load(bundle / "verifier" / "model.onnx")
    size = pipeline.verifier.vocab_size
    table = next(v.const_value for v in graph.graph.initializers.values() if v.shape is not None and v.shape[0] == size)
    with (bundle / "verifier" / "weights.data").open("r+b") as stream:
        stream.seek((table.offset or 0) + poisoned * table.shape[1] * 4)
        stream.write(np.full(4, np.nan, np.float32).tobytes())
    entry = describe_file(bundle / "verifier" / "weights.data")
    edit(bundle, lambda manifest: manifest["files"].update({"verifier/weights.data": entry}))
    damaged = Pipeline.load(bundle, threads=1)
    wanted = Pipeline.load(bundle, threads=1).generate("hello", **options).token_ids
    with pytest.raises(LogitsError, match="tier full of the verifier gave logits with NaN or Inf at position 5"):
        damaged.generate([*damaged.encode("hello", raw=True), poisoned], **{**options, "raw": False})
    for _ in range(3):
        assert damaged.generate("hello", **options).token_ids == wanted
