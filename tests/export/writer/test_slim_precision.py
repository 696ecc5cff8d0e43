"""A bundle whose slim-verifier is the model in fewer bits: one session, one weights file, every tier bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from via_sd.export import ExportError, export_bundle
from via_sd.export.passes.quantize import constant
from via_sd.export.passes.values import find_input
from via_sd.export.tensorrt.source import read_source
from via_sd.export.writer.weights import load_graph, save_graph, write_weights
from via_sd.masks import Mask, write_mask
from via_sd.runtime import load_bundle

LAYERS = 4
STEPS = (40, 5, 1)
#: (precision of full, of the slim-verifier).
PAIRS = [("fp32", "int8"), ("fp32", "int4"), ("int8", "int4")]
DEEP = Mask(("int4", "skip", "int4", "int4"), ("int4", "int4", "skip", "keep"), "int8")


@pytest.fixture(scope="module")
def verifier(checkpoint_of) -> Path:
    """Its embedding is a tensor of its own, which tiers share in full's precision."""
    return checkpoint_of("llama-untied")


@pytest.fixture(scope="module")
def plain_bundles(verifier, tmp_path_factory) -> dict[str, Path]:
    """A bundle without a mask in each precision."""
    root = tmp_path_factory.mktemp("plain")
    return {p: export_bundle(verifier, root / p, precision=p, max_seq_len=96) for p in ("fp32", "int8", "int4")}


@pytest.fixture(scope="module")
def slim_bundles(verifier, tmp_path_factory) -> dict[tuple[str, str], Path]:
    root = tmp_path_factory.mktemp("slim")
    return {
        (full, slim): export_bundle(
            verifier, root / f"{full}-{slim}", precision=full, slim_precision=slim, max_seq_len=96
        )
        for full, slim in PAIRS
    }


def with_embedding_of(full: Path, bundle: Path, directory: Path) -> Path:
    """The graph of `bundle`, written to `directory`, with the embedding of `full`, which its tiers share."""
    model, other = (load_graph(path / "verifier" / "model.onnx") for path in (bundle, full))
    lookup, wanted = (find_input(graph, "input_ids").consumers()[0] for graph in (model.graph, other.graph))
    operands = [constant(f"full.{v.name}", v.const_value.numpy()) for v in wanted.inputs if v.const_value is not None]
    for value in operands:
        model.graph.register_initializer(value)
    table, *scales = operands
    shared = ir.Node(
        wanted.domain,
        wanted.op_type,
        [table, lookup.inputs[1], *scales],
        list(wanted.attributes.values()),
        name="shared",
    )
    ir.convenience.replace_nodes_and_values(
        model.graph, lookup, [lookup], [shared], [lookup.outputs[0]], [shared.outputs[0]]
    )
    directory.mkdir()
    save_graph(model, directory / "model.onnx", write_weights(model, directory))
    return directory / "model.onnx"


def manifest_of(bundle: Path) -> dict:
    return json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("pair", PAIRS)
def test_full_and_slim_are_bundles_of_their_precisions_bit_for_bit(
    pair, plain_bundles, slim_bundles, open_graph, random_tokens, tmp_path
):
    bundle, tokens = slim_bundles[pair], random_tokens(sum(STEPS))
    tiers = manifest_of(bundle)["verifier"]["tiers"]
    for tier, precision in zip(("full", "slim"), pair, strict=True):
        routed = open_graph(bundle / "verifier" / "model.onnx", 96)
        graph = with_embedding_of(plain_bundles[pair[0]], plain_bundles[precision], tmp_path / tier)
        own = open_graph(graph, 96)
        wanted = own.feed_in(STEPS, tokens)
        assert np.array_equal(routed.feed_in(STEPS, tokens, tiers[tier]["keep"]), wanted)
        for name, buffer in own.kv.items():
            assert np.array_equal(routed.kv[name], buffer), name
    alone = open_graph(bundle / "verifier" / "slim.onnx", 96)
    assert np.array_equal(alone.feed_in(STEPS, tokens), wanted)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_quantised_copy_is_stored_once_beside_fulls_weights(pair, plain_bundles, slim_bundles):
    manifest = manifest_of(slim_bundles[pair])
    weights = {
        name: (plain_bundles[name] / "verifier" / "weights.data").stat().st_size for name in ("fp32", "int8", "int4")
    }
    size = (slim_bundles[pair] / "verifier" / "weights.data").stat().st_size
    added = manifest["verifier"]["tiers"]["slim"]["added_bytes"]
    page = 4096  # each tensor begins on one
    assert weights[pair[0]] + added <= size <= weights[pair[0]] + added + 100 * page
    # The slim-verifier has its own copy of everything but embedding and norms.
    embedding = 320 * (64 * int(pair[1][-1]) // 8 + 64 // 32 * 4)
    assert added <= weights[pair[1]] - embedding <= added + 100 * page


def test_the_manifest_describes_what_each_tier_runs(slim_bundles):
    verifier = manifest_of(slim_bundles["fp32", "int8"])["verifier"]
    assert verifier["segments"] == [
        {"start": 0, "stop": 2 * LAYERS, "branches": ["keep", "int8"]},
        {"start": 2 * LAYERS, "stop": 2 * LAYERS + 1, "branches": ["keep", "int8"]},
    ]
    assert verifier["tiers"]["full"]["keep"] == [True, True]
    assert verifier["tiers"]["slim"]["keep"] == [False, False]
    assert next(v for v in verifier["inputs"] if v["name"] == "keep")["shape"] == [2]
    slim = load_bundle(slim_bundles["fp32", "int8"]).masks["slim"]
    assert slim.states == ("int8",) * (2 * LAYERS)
    assert slim.head == "int8"


def test_masks_and_a_slim_precision_combine_and_a_drafter_goes_deeper(verifier, tmp_path, open_graph, random_tokens):
    write_mask(Mask.from_layers([True, False, True, True]), tmp_path / "thin.json")
    write_mask(DEEP, tmp_path / "deep.json")
    bundle = export_bundle(
        verifier,
        tmp_path / "bundle",
        masks=[tmp_path / "thin.json"],
        slim_precision="int8",
        drafter=f"mask:{tmp_path / 'deep.json'}",
        max_seq_len=96,
    )
    masks, tiers = load_bundle(bundle).masks, manifest_of(bundle)["verifier"]["tiers"]
    assert masks["thin"].attention == masks["thin"].mlp == ("int8", "skip", "int8", "int8")
    assert masks["thin"].head == "int8"
    assert (masks["deep"].attention, masks["deep"].mlp, masks["deep"].head) == (DEEP.attention, DEEP.mlp, DEEP.head)
    # Both heads are the same int8 table; the drafter adds its own int4 sublayers.
    assert 0 < tiers["deep"]["added_bytes"] < tiers["thin"]["added_bytes"]
    tokens = random_tokens(sum(STEPS))
    for tier in ("thin", "deep"):
        routed = open_graph(bundle / "verifier" / "model.onnx", 96)
        alone = open_graph(bundle / tiers[tier]["graph"], 96)
        found = routed.feed_in(STEPS, tokens, tiers[tier]["keep"])
        assert np.array_equal(found, alone.feed_in(STEPS, tokens)), tier


def test_a_state_that_is_fulls_own_precision_adds_nothing(verifier, tmp_path):
    mask = Mask(("int8", "skip", "keep", "int8"), ("keep",) * 4, "int8")
    bundle = export_bundle(verifier, tmp_path / "bundle", masks=[mask], precision="int8", max_seq_len=96, check=False)
    verifier_entry = manifest_of(bundle)["verifier"]
    assert verifier_entry["segments"] == [{"start": 2, "stop": 3, "branches": ["keep", "skip"]}]
    assert verifier_entry["tiers"]["slim"]["added_bytes"] == 0
    assert load_bundle(bundle).masks["slim"].states == mask.states


@pytest.mark.parametrize(
    ("precision", "slim_precision", "masks", "match"),
    [
        ("int4", "int8", [], "in int8, and full is int4: a tier has no more bits than full; wanted keep, int4"),
        (
            "int8",
            None,
            [Mask(("int8",) * 4, ("int4",) * 4), Mask(("keep",) * 4, ("keep",) * 4)],
            "two masks are called",
        ),
        ("fp32", "fp16", [], "slim precision 'fp16' is not known; wanted int8, int4"),
        ("int8", "int8", [], "computes what full computes"),
    ],
)
def test_tiers_that_make_no_sense_are_refused(precision, slim_precision, masks, match, verifier, tmp_path):
    with pytest.raises(ExportError, match=match):
        export_bundle(
            verifier, tmp_path / "bundle", precision=precision, slim_precision=slim_precision, masks=masks, check=False
        )
    assert list(tmp_path.iterdir()) == []


def test_engines_are_not_built_from_a_tier_in_a_precision_of_its_own(slim_bundles):
    with pytest.raises(ExportError, match=r"tier slim of .* has sublayers or the LM head in int8, and engines have"):
        read_source(slim_bundles["fp32", "int8"])


def test_engines_are_built_from_a_mask_that_names_the_precision_of_full(verifier, tmp_path):
    mask = Mask(("int8", "skip", "keep", "keep"), ("int8", "skip", "keep", "keep"), "int8")
    bundle = export_bundle(verifier, tmp_path / "bundle", masks=[mask], precision="int8", max_seq_len=96, check=False)
    assert list(read_source(bundle).decoders[0].engines) == ["full", "slim"]
