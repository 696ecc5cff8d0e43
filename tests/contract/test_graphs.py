"""What a bundle's graphs take and give is what the contract says, and nothing else says it."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import via_sd
from via_sd.contract import graphs
from via_sd.contract.graphs import BUNDLE_INPUTS, BUNDLE_OUTPUTS, FULL, KEEP, PORTABLE_INPUTS, PORTABLE_OUTPUTS
from via_sd.export.portable import to_portable
from via_sd.export.writer.weights import load_graph
from via_sd.runtime import load_bundle

LAYERS = 6


def check(found, wanted, sizes):
    """Names, element types and the sizes that do not vary; KV buffers aside."""
    found = {value.name: value for value in found if graphs.kv_place(value.name) is None}
    found = {name: value for name, value in found.items() if not name.startswith("present.")}
    assert set(found) == {tensor.name for tensor in wanted}
    for tensor in wanted:
        value = found[tensor.name]
        assert value.dtype == ir.DataType.from_numpy(np.dtype(tensor.dtype)), tensor
        assert len(value.shape) == len(tensor.shape), tensor
        for dim, size in zip(tensor.shape, value.shape, strict=True):
            fixed = sizes.get(dim, dim)
            assert isinstance(size, int) == isinstance(fixed, int), tensor
            assert not isinstance(fixed, int) or size == fixed, tensor


def check_kv(graph, layers, shape):
    past, present = ({value.name: list(value.shape) for value in values} for values in (graph.inputs, graph.outputs))
    names = [pair for layer in layers for pair in graphs.kv_names(layer)]
    assert [name for name in past if name.startswith("past_key_values.")] == [before for before, _ in names]
    assert [name for name in present if name.startswith("present.")] == [after for _, after in names]
    for before, after in names:
        for sizes in (past[before], present[after]):
            assert [dim if isinstance(dim, int) else None for dim in sizes] == shape


@pytest.mark.parametrize("tier", ["full", "slim"])
def test_the_graphs_of_a_bundle_have_the_inputs_and_outputs_of_the_contract(tier, tiny_bundle):
    bundle = load_bundle(tiny_bundle)
    verifier = bundle.manifest["verifier"]
    graph = ir.load(bundle.file(verifier["tiers"][tier]["graph"])).graph
    sizes = {"vocab": verifier["vocab_size"], "flags": len(verifier["tiers"][FULL]["keep"])}
    check(graph.inputs, [t for t in BUNDLE_INPUTS if tier == FULL or t is not KEEP], sizes)
    check(graph.outputs, BUNDLE_OUTPUTS, sizes)
    kept = [True] * LAYERS if tier == FULL else bundle.masks[tier].keep_attention
    kv = verifier["kv"]
    layers = [layer for layer in range(LAYERS) if kept[layer]]
    check_kv(graph, layers, [None, kv["num_heads"], None, kv["head_dim"]])


@pytest.mark.parametrize("tier", ["full", "slim"])
def test_portable_graphs_have_the_inputs_and_outputs_of_the_contract(tier, tiny_bundle):
    bundle = load_bundle(tiny_bundle)
    verifier, mask = bundle.manifest["verifier"], bundle.masks.get(tier)
    model = load_graph(bundle.file(verifier["graph"]))
    graph = to_portable(model, max_seq_len=bundle.max_seq_len, dtype="fp16", mask=mask).graph
    sizes = {"vocab": verifier["vocab_size"]}
    check(graph.inputs, PORTABLE_INPUTS, sizes)
    check(graph.outputs, PORTABLE_OUTPUTS, sizes)
    kv = verifier["kv"]
    layers = [layer for layer in range(LAYERS) if mask is None or mask.keep_attention[layer]]
    check_kv(graph, layers, [None, kv["num_heads"], bundle.max_seq_len, kv["head_dim"]])


def test_kv_names_are_read_as_they_are_written():
    names = [pair for layer in (0, 7, 12) for pair in graphs.kv_names(layer)]
    places = [(layer, part) for layer in (0, 7, 12) for part in graphs.PARTS]
    assert [graphs.kv_place(past) for past, _ in names] == places
    for other in (None, "", "input_ids", "present.0.key", "past_key_values.0.query", "past_key_values.x.key"):
        assert graphs.kv_place(other) is None


def test_no_other_module_spells_the_names_out():
    """`keep` and `logits` are words of their own as well, in masks and in rows."""
    words = {KEEP.name, graphs.LOGITS.name}
    names = {t.name for t in (*BUNDLE_INPUTS, *BUNDLE_OUTPUTS, *PORTABLE_INPUTS, *PORTABLE_OUTPUTS)} - words
    names |= {graphs.PAST, graphs.PRESENT}
    root = Path(via_sd.__file__).parent
    modules = [file for part in ("contract", "export", "runtime", "tools") for file in (root / part).rglob("*.py")]
    assert len(modules) > 100
    found = set()
    for file in modules:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and (
                node.value in names or str(node.value).startswith(("past_key_values", "present."))
            ):
                found.add(f"{file.relative_to(root)}: {node.value}")
    assert {place for place in found if not place.startswith("contract/graphs.py")} == set()
