"""A bundle says what it holds, holds each weight once, and appears whole or not at all."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import xxhash

from via_sd.export import ExportError, export_bundle
from via_sd.export.sources.checkpoint import open_checkpoint
from via_sd.masks import Mask, MaskError, write_mask
from via_sd.runtime import load_bundle

LAYERS = 4
SLIM = Mask.from_flags((True, False, False, True), (True, True, False, False), name="slim")
DEEP = Mask.from_flags((True, False, False, False), (True, False, False, False), name="deep")
ONNX_DTYPES = {"tensor(float)": "float32", "tensor(int64)": "int64", "tensor(int32)": "int32", "tensor(bool)": "bool"}


@pytest.fixture(scope="module")
def verifier(checkpoint_of) -> Path:
    return checkpoint_of("llama")


@pytest.fixture(scope="module")
def bundles(verifier, tmp_path_factory) -> dict[str, Path]:
    """One bundle per precision, each with a slim-verifier and a mask drafter inside it."""
    root = tmp_path_factory.mktemp("bundles")
    write_mask(DEEP, root / "deep.json")
    return {
        precision: export_bundle(
            verifier,
            root / precision,
            masks=[SLIM],
            drafter=f"mask:{root / 'deep.json'}",
            precision=precision,
            max_seq_len=96,
        )
        for precision in ("fp32", "int8", "int4")
    }


@pytest.fixture(params=["fp32", "int8", "int4"])
def bundle(request, bundles) -> Path:
    return bundles[request.param]


def manifest_of(bundle: Path) -> dict:
    return json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))


def test_manifest_lists_every_file_with_its_size_and_hashes(bundle):
    listed = manifest_of(bundle)["files"]
    present = {p.relative_to(bundle).as_posix() for p in bundle.rglob("*") if p.is_file()} - {"bundle.json"}
    assert set(listed) == present
    for name, entry in listed.items():
        data = (bundle / name).read_bytes()
        assert entry == {
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "xxh3": xxhash.xxh3_64(data).hexdigest(),
        }


def test_manifest_states_the_graphs_inputs_and_outputs_as_they_are(bundle):
    described = manifest_of(bundle)["verifier"]
    session = ort.InferenceSession(str(bundle / described["graph"]), providers=["CPUExecutionProvider"])
    for kind, values in (("inputs", session.get_inputs()), ("outputs", session.get_outputs())):
        actual = [
            {
                "name": v.name,
                "dtype": ONNX_DTYPES[v.type],
                "shape": [d if isinstance(d, int) else str(d) for d in v.shape],
            }
            for v in values
        ]
        assert described[kind] == actual
    assert described["kv"] == {
        "past": "past_key_values.{layer}.{part}",
        "present": "present.{layer}.{part}",
        "parts": ["key", "value"],
        "num_layers": LAYERS,
        "num_heads": 2,
        "head_dim": 16,
        "dtype": "float32",
    }
    assert described["vocab_size"] == 320


def test_manifest_gives_each_tier_its_graph_mask_and_keep_vector(bundle):
    manifest = manifest_of(bundle)
    tiers, segments = manifest["verifier"]["tiers"], manifest["verifier"]["segments"]
    assert list(tiers) == ["full", "slim", "deep"]  # highest rank first
    assert manifest["slim"] == "slim"
    assert manifest["drafter"] == {"kind": "mask", "tier": "deep"}
    weights = (bundle / "verifier" / "weights.data").stat().st_size
    own = tiers["full"].pop("added_bytes")
    assert weights - 4096 * 100 < own <= weights  # each tensor begins on a page
    assert tiers["full"] == {"keep": [True] * len(segments), "graph": "verifier/model.onnx"}
    for mask in (SLIM, DEEP):
        flags = [True] * (2 * LAYERS)
        for segment, keep in zip(segments, tiers[mask.name]["keep"], strict=True):
            assert segment["branches"] == ["keep", "skip"]
            flags[segment["start"] : segment["stop"]] = [keep] * (segment["stop"] - segment["start"])
        assert tuple(flags) == mask.sublayers
        assert (bundle / tiers[mask.name]["graph"]).is_file()
        assert tiers[mask.name]["mask"] == mask.to_json()
        assert tiers[mask.name]["added_bytes"] == 0


def test_manifest_names_model_precision_limits_and_makers(bundles, verifier):
    with open_checkpoint(verifier) as checkpoint:
        identity = checkpoint.identity
    for precision, path in bundles.items():
        manifest = manifest_of(path)
        assert (manifest["format"], manifest["version"]) == ("via-sd-bundle", 2)
        assert manifest["model"] == identity.to_json()
        assert manifest["precision"] == precision
        assert manifest["max_seq_len"] == 96
        assert {"via-sd-export", "mobius-onnx", "onnx-ir", "onnxruntime", "torch", "transformers"} <= set(
            manifest["made_by"]
        )


def test_export_records_how_the_check_against_transformers_went(bundles):
    exact, coarse = manifest_of(bundles["fp32"])["check"], manifest_of(bundles["int4"])["check"]
    assert exact["positions"] == coarse["positions"] == 47
    assert exact["max_abs_difference"] < 1e-4
    assert exact["top1_agreement"] == 1.0
    assert coarse["max_abs_difference"] > 1e-2
    assert 0 < coarse["mean_kl"] < 3


def external_tensors(graph: Path) -> dict[str, tuple[str, int, int]]:
    """(file, offset, length) of every tensor a graph file keeps outside, branches included."""
    model = onnx.load(str(graph), load_external_data=False)
    found = {}
    for tensor in model.graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if place:
            found[tensor.name] = (place["location"], int(place["offset"]), int(place["length"]))
        else:
            assert len(tensor.SerializeToString()) < 4096, tensor.name
    return found


def test_the_weights_file_holds_each_tensor_once(bundle):
    tensors = external_tensors(bundle / "verifier/model.onnx")
    assert {file for file, _, _ in tensors.values()} == {"weights.data"}
    data = (bundle / "verifier/weights.data").read_bytes()
    places = sorted({(offset, length) for _, offset, length in tensors.values()})
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(places))
    contents = [hashlib.sha256(data[offset : offset + length]).digest() for offset, length in places]
    assert len(set(contents)) == len(contents)
    padding = len(data) - sum(length for _, length in places)
    assert padding < 4096 * len(places)


def test_embedding_and_head_have_one_place_in_the_file(bundles):
    for precision in ("int8", "int4"):
        tensors = external_tensors(bundles[precision] / "verifier/model.onnx")
        embedding = [name for name in tensors if name.startswith("model.embed_tokens.weight.q")]
        table = [name for name in embedding if not name.endswith(".scales")]
        assert len(table) == 2
        assert len({tensors[name] for name in table}) == 1
    tensors = external_tensors(bundles["fp32"] / "verifier/model.onnx")
    assert len([name for name in tensors if "embed" in name or "lm_head" in name]) == 1


def test_the_slim_graphs_add_no_weights(bundle):
    full = set(external_tensors(bundle / "verifier/model.onnx").values())
    for name in ("slim-slim.onnx", "slim-deep.onnx"):
        graph = bundle / "verifier" / name
        slim = set(external_tensors(graph).values())
        assert slim < full
        assert graph.stat().st_size < 60_000
    assert not [p for p in (bundle / "verifier").iterdir() if p.suffix == ".data" and p.name != "weights.data"]


def test_a_single_masks_graph_is_called_slim(verifier, tmp_path):
    bundle = export_bundle(verifier, tmp_path / "bundle", masks=[SLIM], max_seq_len=64, check=False)
    assert sorted(p.name for p in (bundle / "verifier").iterdir()) == ["model.onnx", "slim.onnx", "weights.data"]
    assert manifest_of(bundle)["check"] is None


def test_int4_weights_take_a_seventh_of_the_room(bundles):
    """Four bits and a scale of 32 in blocks of 32 are five bits a weight; norms and rotary tables stay as they are."""
    size = {p: (bundles[p] / "verifier/weights.data").stat().st_size for p in bundles}
    assert size["int4"] < size["int8"] < size["fp32"]
    assert size["int4"] < size["fp32"] / 3  # tiny tensors are mostly page alignment


def test_the_runtime_reads_what_was_written(bundle):
    loaded = load_bundle(bundle)
    assert loaded.slim == "slim"
    assert loaded.masks["slim"].sublayers == SLIM.sublayers
    assert loaded.masks["deep"].sublayers == DEEP.sublayers


def test_two_exports_of_one_checkpoint_are_the_same_bytes(verifier, bundles, tmp_path):
    again = export_bundle(
        verifier, tmp_path / "again", masks=[SLIM, DEEP], precision="int4", max_seq_len=96, check=False
    )
    first, second = (manifest_of(b)["files"] for b in (bundles["int4"], again))
    assert first["verifier/weights.data"]["sha256"] == second["verifier/weights.data"]["sha256"]
    assert first["verifier/slim-slim.onnx"]["sha256"] == second["verifier/slim-slim.onnx"]["sha256"]


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_no_float32_weights_are_written_on_the_way_to_quantised_ones(precision, verifier, tmp_path):
    """The float32 graph is checked with its weights in memory: a copy on disk would be as large as the checkpoint."""
    written: dict[str, int] = {}

    def watch(stage: str, share: float | None) -> None:
        sizes = [p.stat().st_size for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".json"]
        written[stage] = max(written.get(stage, 0), sum(sizes))

    bundle = export_bundle(verifier, tmp_path / "b", precision=precision, max_seq_len=64, progress=watch)
    assert written["checking the graph before it is quantised"] == 0
    assert written["quantising"] == 0
    quantised = (bundle / "verifier" / "weights.data").stat().st_size
    assert quantised < written["checking the bundle's graph"] < quantised + 200_000  # and the graphs


# -- all or nothing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_export_that_is_interrupted_at_any_stage_leaves_nothing(interruption, verifier, tmp_path):
    stages: list[str] = []
    export_bundle(
        verifier,
        tmp_path / "whole",
        masks=[SLIM],
        precision="int4",
        max_seq_len=64,
        progress=lambda stage, _: stages.append(stage),
    )
    shutil.rmtree(tmp_path / "whole")
    distinct = list(dict.fromkeys(stages))
    assert {"building the graph", "quantising", "writing weights", "checking the bundle's graph", "hashing"} <= {
        *distinct
    }
    for last in distinct:

        def interrupt(stage: str, share: float | None, last: str = last) -> None:
            if stage == last:
                raise interruption(last)

        with pytest.raises(interruption):
            export_bundle(
                verifier, tmp_path / "broken", masks=[SLIM], precision="int4", max_seq_len=64, progress=interrupt
            )
        assert list(tmp_path.iterdir()) == [], f"interrupted at {last!r}"


def test_an_existing_directory_is_refused_and_left_alone(verifier, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(ExportError, match="exists"):
        export_bundle(verifier, tmp_path / "mine")
    assert [p.name for p in tmp_path.rglob("*")] == ["mine", "thesis.txt"]


# -- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp64", "int3"])
def test_a_precision_a_bundle_does_not_take_is_refused(precision, verifier, tmp_path):
    with pytest.raises(ExportError, match="fp32, fp16, bf16, int8, int4"):
        export_bundle(verifier, tmp_path / "b", precision=precision)


@pytest.mark.parametrize("length", [0, 1, 257, -5])
def test_a_capacity_beyond_the_model_is_refused(length, verifier, tmp_path):
    with pytest.raises(ExportError, match=f"max-seq-len is {length}, wanted 2 to 256"):
        export_bundle(verifier, tmp_path / "b", max_seq_len=length)
    assert list(tmp_path.iterdir()) == []


def test_heads_of_a_size_the_engine_cannot_run_are_refused(new_checkpoint, tmp_path):
    odd = new_checkpoint(tmp_path / "odd", "llama", head_dim=8)
    with pytest.raises(ExportError, match="heads of size 8"):
        export_bundle(odd, tmp_path / "b", check=False)


def test_the_models_own_limit_is_the_default_capacity(verifier, tmp_path):
    assert manifest_of(export_bundle(verifier, tmp_path / "b", check=False))["max_seq_len"] == 256


def test_masks_that_do_not_fit_are_refused_with_the_reason(verifier, tmp_path, checkpoint_of):
    def refused(match: str, *masks, **options) -> None:
        with pytest.raises((ExportError, MaskError), match=match):
            export_bundle(verifier, tmp_path / "out" / "b", masks=masks, check=False, **options)

    refused("is for 5 layers, the model .llama. has 4", Mask.from_layers([True] * 4 + [False]))
    with open_checkpoint(checkpoint_of("qwen2")) as other:
        refused("made for another model: model_type", Mask.from_layers([True] * 3 + [False], model=other.identity))
    refused("cannot be called 'full'", Mask.from_layers([True] * 3 + [False], name="full"))
    refused("two masks are called 'slim'", SLIM, SLIM)
    inner = Mask.from_flags((True, True, False, True), SLIM.keep_mlp, name="inner")
    refused(r"'inner' runs the attention of layers \[1\], which 'slim' leaves out", SLIM, inner)
    write_mask(inner, tmp_path / "inner.json")
    refused(r"'inner' runs the attention of layers \[1\]", SLIM, drafter=f"mask:{tmp_path / 'inner.json'}")
    refused("cannot read mask", tmp_path / "missing.json")
    (tmp_path / "bare.json").write_text("[1, 2]")
    refused("--mask-format keep|skip", tmp_path / "bare.json")
    assert not list((tmp_path / "out").iterdir())


def test_a_mask_file_is_named_after_its_file_and_read_with_the_models_length(verifier, tmp_path):
    (tmp_path / "thin.json").write_text("[1, 2]")
    bundle = export_bundle(
        verifier, tmp_path / "b", masks=[tmp_path / "thin.json"], mask_format="skip", max_seq_len=64, check=False
    )
    assert manifest_of(bundle)["slim"] == "thin"
    assert load_bundle(bundle).masks["thin"].keep_mlp == (True, False, False, True)


# -- a model as drafter ----------------------------------------------------------------------------------------------


def test_a_model_drafter_is_exported_with_a_description_of_its_own(verifier, new_checkpoint, tmp_path):
    drafter = new_checkpoint(
        tmp_path / "drafter", "qwen2", num_hidden_layers=2, vocab_size=336, max_position_embeddings=64
    )
    bundle = export_bundle(verifier, tmp_path / "b", drafter=str(drafter), precision="int8", max_seq_len=96)
    described = manifest_of(bundle)["drafter"]
    assert (described["kind"], described["vocab_size"], described["shared_vocab"]) == ("model", 336, 259)
    assert described["model"]["model_type"] == "qwen2"
    assert described["max_seq_len"] == 64  # its own limit is shorter than the verifier's
    assert described["kv"]["num_layers"] == 2
    session = ort.InferenceSession(str(bundle / described["graph"]), providers=["CPUExecutionProvider"])
    assert [v["name"] for v in described["inputs"]] == [v.name for v in session.get_inputs()]
    assert (bundle / described["weights"]).is_file()


def test_a_drafter_of_another_vocabulary_is_refused_and_the_token_named(
    verifier, new_checkpoint, new_tokenizer, tmp_path
):
    drafter = new_checkpoint(tmp_path / "drafter", "llama")
    new_tokenizer(extra=["<tool>"]).save_pretrained(drafter)
    with pytest.raises(ExportError, match=r"'<tool>' is 259 for the drafter and missing for the verifier"):
        export_bundle(verifier, tmp_path / "b", drafter=str(drafter), check=False)
    assert not (tmp_path / "b").exists()


def test_a_drafter_that_does_not_exist_is_refused(verifier, tmp_path):
    with pytest.raises(ExportError, match="does not exist"):
        export_bundle(verifier, tmp_path / "b", drafter=str(tmp_path / "nothing"), check=False)


def test_a_bundles_graph_computes_what_transformers_computes(bundles, verifier, reference, random_tokens, open_graph):
    """Full, and slim on its own, from the files alone."""
    tokens = random_tokens(47)
    wanted = {
        "model.onnx": reference(verifier, tokens),
        "slim-slim.onnx": reference(verifier, tokens, skip_attention=[1, 2], skip_mlp=[2, 3]),
    }
    for name, logits in wanted.items():
        session = open_graph(bundles["fp32"] / "verifier" / name, 96)
        assert np.abs(session.feed_in((40, 5, 1, 1), tokens) - logits).max() < 1e-4
