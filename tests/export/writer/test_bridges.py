"""Bridges: linear maps in the place of runs of sublayers, fitted on the stream of the tier they are in."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import transformers
from onnx import numpy_helper

from tests.support.graph_tiers import STEPS, Tiers, variants_of
from via_sd.export import ExportError, export_bundle
from via_sd.export.passes import Bridge, PrunePass, Substitutes, bridge_name
from via_sd.export.tensorrt.source import read_source
from via_sd.export.writer.bridges import fit_bridge
from via_sd.export.writer.check import compare_logits
from via_sd.masks import Mask

WIDTH = 64
#: Sublayers 2 to 4 under a bridge, between kept ones and one that is skipped.
STATES = ["keep", "keep", "bridge", "bridge", "bridge", "skip", "keep", "keep"]
BRIDGED = Mask.from_states(STATES)
SKIPPED = BRIDGED.without_bridges()
NAME = bridge_name(BRIDGED, range(2, 5))


def random_bridge(seed: int = 0, bits: int = 32) -> Bridge:
    rng = np.random.default_rng(seed)
    weight, bias = 0.1 * rng.standard_normal((WIDTH, WIDTH)), rng.standard_normal(WIDTH)
    return Bridge(weight.astype(np.float32), bias.astype(np.float32), np.ones(WIDTH, np.float32), bits)


def test_a_fit_finds_the_map_that_made_the_data_and_leaves_the_first_position_out():
    rng = np.random.default_rng(1)
    wanted = random_bridge()
    before = [rng.standard_normal((200, WIDTH)).astype(np.float32) for _ in range(4)]
    added = [stream @ wanted.weight + wanted.bias for stream in before]
    for stream, target in zip(before, added, strict=True):
        stream[0], target[0] = 1e3, -1e4
    found = fit_bridge(before, added, 8)
    # The penalty draws the map a hundredth of the way to zero.
    assert np.abs(found.weight - wanted.weight).max() < 0.02 * np.abs(wanted.weight).max()
    assert np.abs(found.bias - wanted.bias).max() < 0.01
    assert found.energy == pytest.approx(np.ones(WIDTH), abs=0.3)
    assert found.bits == 8


def test_a_bridge_that_adds_nothing_is_a_skip(lowered, random_tokens, workshop):
    model, tokens = lowered("llama").model, random_tokens(sum(STEPS))
    nothing = Bridge(np.zeros((WIDTH, WIDTH), np.float32), np.zeros(WIDTH, np.float32), np.ones(WIDTH, np.float32))
    bridged = PrunePass(BRIDGED, Substitutes(bridges={NAME: nothing}))(model.clone()).model
    skipped = PrunePass(SKIPPED)(model.clone()).model
    found, wanted = workshop.open(bridged, "bridged"), workshop.open(skipped, "skipped")
    assert np.array_equal(found.feed_in(STEPS, tokens), wanted.feed_in(STEPS, tokens))
    assert found.kv.keys() == wanted.kv.keys()


@pytest.mark.parametrize("family", ["llama", "granite", "gemma2"])
def test_a_bridge_moves_the_stream_by_its_map(family, lowered, checkpoint_of, random_tokens, reference, workshop):
    """Against transformers, whose stream the same map moves where the run starts."""
    tokens = random_tokens(sum(STEPS))
    bridge = random_bridge()
    pruned = PrunePass(BRIDGED, Substitutes(bridges={NAME: bridge}))(lowered(family).model.clone()).model
    weight, bias = torch.from_numpy(bridge.weight), torch.from_numpy(bridge.bias)
    wanted = reference(
        checkpoint_of(family),
        tokens,
        skip_attention=[1, 2],
        skip_mlp=[1, 2],
        move={1: lambda stream: stream + stream @ weight + bias},
    )
    found = workshop.open(pruned, "bridged").feed_in(STEPS, tokens)
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("bits", [32, 8, 4])
def test_routed_and_pruned_graphs_agree_with_bridges_bit_for_bit(bits, lowered, random_tokens, workshop):
    model = lowered("llama").model
    drafter = Mask.from_states(["keep", "skip", "bridge", "bridge", *["skip"] * 3, "int8"], name="drafter")
    bridges = {NAME: random_bridge(0, bits), bridge_name(drafter, range(2, 4)): random_bridge(1, bits)}
    masks = [BRIDGED, drafter]
    substitutes = Substitutes(variants_of(model, masks).variants, bridges)
    Tiers(model, masks, workshop, substitutes).check(random_tokens(sum(STEPS)))


@pytest.fixture(scope="module")
def verifier(checkpoint_of) -> Path:
    return checkpoint_of("llama-untied")


def export(verifier: Path, out: Path, mask: Mask, **options) -> Path:
    return export_bundle(verifier, out, masks=[mask], max_seq_len=96, check=False, **options)


def manifest_of(bundle: Path) -> dict:
    return json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def bundles(verifier, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bridged")
    return {
        "bridged": export(verifier, root / "bridged", BRIDGED),
        "skipped": export(verifier, root / "skipped", SKIPPED),
    }


@pytest.fixture(scope="module")
def linear_mlp(new_checkpoint, tmp_path_factory) -> Path:
    """A model whose second MLP is linear in the stream, which is the embedding still and has the same norm everywhere:
    its gate reads a channel that never changes.
    """
    directory = new_checkpoint(tmp_path_factory.mktemp("linear") / "model", "llama-untied")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    embedding = model.model.embed_tokens.weight.data
    embedding.normal_(generator=torch.Generator().manual_seed(0))
    embedding[:, 0] = 0
    embedding /= embedding.square().mean(-1, keepdim=True).sqrt()
    embedding[:, 0] = 1
    first, second = model.model.layers[:2]
    for silent in (first.self_attn.o_proj, first.mlp.down_proj, second.self_attn.o_proj):
        silent.weight.data.zero_()
    second.mlp.gate_proj.weight.data.zero_()
    second.mlp.gate_proj.weight.data[:, 0] = 1
    model.save_pretrained(directory)
    return directory


def test_a_bridge_replaces_what_is_linear(linear_mlp, tmp_path, open_graph, random_tokens):
    tokens = random_tokens(90)
    states = ["keep"] * 8
    logits = {}
    for state in ("keep", "skip", "bridge"):
        states[3] = state
        bundle = export(linear_mlp, tmp_path / state, Mask.from_states([*states[:7], "skip"]))
        keep = manifest_of(bundle)["verifier"]["tiers"]["slim"]["keep"]
        logits[state] = open_graph(bundle / "verifier/model.onnx", 96).feed_in([90], tokens, keep)
    bridged, skipped = (compare_logits(logits[state], logits["keep"]) for state in ("bridge", "skip"))
    assert skipped.top1_agreement < 0.7
    assert bridged.top1_agreement > 0.97
    assert bridged.mean_kl < 1e-3 * skipped.mean_kl


def test_full_and_its_weights_are_as_without_a_bridge(bundles, open_graph, random_tokens):
    tokens = random_tokens(sum(STEPS))
    found, wanted = (
        open_graph(bundles[name] / "verifier/model.onnx", 96).feed_in(STEPS, tokens) for name in ("bridged", "skipped")
    )
    assert np.array_equal(found, wanted)
    tiers = manifest_of(bundles["bridged"])["verifier"]["tiers"]
    assert tiers["slim"]["added_bytes"] == 4 * (WIDTH * WIDTH) + (4 * WIDTH if 4 * WIDTH > 1024 else 0)
    assert tiers["full"]["added_bytes"] == manifest_of(bundles["skipped"])["verifier"]["tiers"]["full"]["added_bytes"]
    assert not list(bundles["bridged"].rglob(".*"))


def test_the_manifest_names_the_bridge_where_its_run_starts(bundles):
    segments = manifest_of(bundles["bridged"])["verifier"]["segments"]
    assert segments == [
        {"start": 2, "stop": 3, "branches": ["keep", "bridge.slim.2"]},
        {"start": 3, "stop": 6, "branches": ["keep", "skip"]},
    ]


def test_a_bridge_has_the_precision_of_its_tier(verifier, tmp_path, open_graph, random_tokens):
    bundle = export(verifier, tmp_path / "bundle", BRIDGED, slim_precision="int8")
    tiers = manifest_of(bundle)["verifier"]["tiers"]
    alone = open_graph(bundle / "verifier/slim.onnx", 96)
    names = (bundle / "verifier/slim.onnx").read_bytes()
    assert b"bridge.slim.2.weight.q8" in names
    assert b"bridge.slim.2.weight.q8.scales" in names
    tokens = random_tokens(sum(STEPS))
    routed = open_graph(bundle / "verifier/model.onnx", 96).feed_in(STEPS, tokens, tiers["slim"]["keep"])
    assert np.array_equal(alone.feed_in(STEPS, tokens), routed)


def test_a_fit_is_the_same_every_time(bundles, verifier, tmp_path):
    again = export(verifier, tmp_path / "again", BRIDGED)
    assert manifest_of(again)["files"] == manifest_of(bundles["bridged"])["files"]


def test_several_bridges_are_fitted_in_order(verifier, tmp_path, open_graph):
    """The second is fitted to the stream behind the first, and so differs from one that is alone."""
    both = Mask.from_states(["keep", "keep", "bridge", "bridge", "keep", "bridge", "keep", "keep"])
    second = Mask.from_states(["keep"] * 5 + ["bridge", "keep", "keep"])
    weights = []
    for name, mask in (("both", both), ("second", second)):
        bundle = export(verifier, tmp_path / name, mask)
        weights.append(_weight_of(bundle / "verifier/slim.onnx", "bridge.slim.5.weight"))
    assert weights[0].shape == weights[1].shape == (WIDTH, WIDTH)
    assert np.abs(weights[0] - weights[1]).max() > 1e-3


def _weight_of(graph: Path, name: str) -> np.ndarray:
    tensors = onnx.load(str(graph)).graph.initializer
    return numpy_helper.to_array(next(tensor for tensor in tensors if tensor.name == name))


def test_engines_are_not_built_from_a_bundle_with_bridges(bundles):
    with pytest.raises(ExportError, match=r"tier slim of .* has bridges, and engines have neither"):
        read_source(bundles["bridged"])
