"""Weight-only quantisation: what the kernels compute is what the stored numbers say, each stored once."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from via_sd.export.passes import (
    FuseGateUpPass,
    PrunePass,
    QuantizePass,
    RoutePass,
    constant_products,
    keep_vector,
    plan_segments,
)
from via_sd.export.passes.block_scales import refine_int4
from via_sd.export.passes.lower import lower
from via_sd.export.passes.quantize import SHARES_BYTES_OF, quantize_blocks
from via_sd.export.sources.checkpoint import open_checkpoint
from via_sd.export.writer.check import compare_logits, run_graph
from via_sd.export.writer.input_energy import add_energy_outputs, input_energy
from via_sd.export.writer.precision import quantise
from via_sd.export.writer.stepper import Stepper
from via_sd.masks import Mask

STEPS = (40, 5, 1, 1)
BLOCK = 32


def dequantise(packed: np.ndarray, scales: np.ndarray, bits: int, inner: int) -> np.ndarray:
    """The matrix [K, N] that packed blocks and their scales stand for: unsigned, centred, low half of a byte first."""
    if bits == 4:
        packed = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    centred = packed.astype(np.float32) - (1 << (bits - 1))
    return (centred * scales[..., None]).reshape(len(packed), -1)[:, :inner].T


def rows_of(lookup: ir.Node, width: int) -> np.ndarray:
    """The table [vocab, width] that the operands of `GatherBlockQuantized` stand for."""
    bits = lookup.attributes.get_int("bits")
    rows, scales = lookup.inputs[0].const_value.numpy(), lookup.inputs[2].const_value.numpy()
    if bits == 4:
        rows = np.stack([rows & 15, rows >> 4], axis=-1).reshape(len(rows), -1)
    centred = rows[:, :width].astype(np.float32) - (1 << (bits - 1))
    return centred * np.repeat(scales, BLOCK, axis=1)[:, :width]


def embedding_of(model: ir.Model) -> ir.Value:
    """The table in floating point that tokens are looked up in."""
    tokens = next(value for value in model.graph.inputs if value.name == "input_ids")
    return next(node.inputs[0] for node in tokens.consumers() if node.op_type == "Gather")


def assert_near(lookup: ir.Node, table: np.ndarray) -> None:
    """The quantised table that `lookup` reads is `table` but for what its bits cost."""
    error = rows_of(lookup, table.shape[1]) - table
    assert np.sqrt(np.mean(error**2) / np.mean(table**2)) < {4: 0.1, 8: 0.006}[lookup.attributes.get_int("bits")]


def dequantised_by_hand(model: ir.Model, quantised: ir.Model) -> ir.Model:
    """`model` with every weight that `quantised` stores in blocks replaced by what the blocks stand for."""
    copy = model.clone()
    tables = quantised.graph.initializers
    for node in quantised.graph:
        if node.op_type == "GatherBlockQuantized":
            weight = embedding_of(copy)
            rows = rows_of(node, weight.const_value.shape.numpy()[1])
            weight.const_value = ir.tensor(rows, name=weight.name)
        if node.op_type != "MatMulNBits":
            continue
        packed, scales = (value.const_value.numpy() for value in node.inputs[1:3])
        bits, inner = node.attributes.get_int("bits"), node.attributes.get_int("K")
        name = node.inputs[1].name.removesuffix(f".q{bits}")
        weight = copy.graph.initializers[name]
        matrix = dequantise(packed, scales, bits, inner)
        if weight.const_value.shape.numpy() != matrix.shape:  # the embedding's own layout, [vocab, hidden]
            matrix = matrix.T
        assert weight.const_value.shape.numpy() == matrix.shape
        weight.const_value = ir.tensor(np.ascontiguousarray(matrix), name=name)
    assert tables
    return copy


def with_accuracy_level(model: ir.Model, level: int) -> ir.Model:
    """A copy whose products keep activations in float32 (level 0) or round them to int8 (level 4)."""
    copy = model.clone()
    for node in copy.graph:
        if node.op_type == "MatMulNBits":
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", level)
    return copy


@pytest.mark.parametrize("family", ["llama", "llama-untied", "granite", "qwen3", "gemma2", "phi3"])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_graph_equals_one_whose_weights_were_dequantised_by_hand(
    bits, family, lowered, random_tokens, workshop
):
    tokens = random_tokens(sum(STEPS))
    fused = lowered(family).model.clone()
    FuseGateUpPass()(fused)
    quantised = fused.clone()
    QuantizePass(bits)(quantised)
    wanted = workshop.open(dequantised_by_hand(fused, quantised), "by-hand").feed_in(STEPS, tokens)
    exact = workshop.open(with_accuracy_level(quantised, 0), "exact").feed_in(STEPS, tokens)
    as_shipped = workshop.open(quantised, "as-shipped").feed_in(STEPS, tokens)
    unquantised = workshop.open(fused, "unquantised").feed_in(STEPS, tokens)
    assert np.abs(exact - wanted).max() < 1e-4
    # Activations rounded to int8 in the product: far less than what rounding weights to four bits costs.
    assert np.abs(as_shipped - wanted).max() < 0.1 * np.abs(wanted).max()
    assert np.abs(unquantised - wanted).max() > 1e-3


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_hold_the_matrix_to_half_a_step(bits):
    matrix = np.random.default_rng(0).standard_normal((64, 24)).astype(np.float32)
    packed, scales = quantize_blocks(matrix, bits, BLOCK)
    assert packed.dtype == np.uint8
    assert packed.shape == (24, 2, BLOCK * bits // 8)
    assert scales.shape == (24, 2)
    step = np.repeat(np.abs(scales), BLOCK, axis=1).T
    error = np.abs(dequantise(packed, scales, bits, 64) - matrix)
    # The symmetric range has one step less on one side; only the value that fills it may be a whole step off.
    assert (error <= 1.01 * step).all()
    assert np.quantile(error / step, 0.95) <= 0.51


@pytest.fixture
def outlier_channels():
    """A matrix [64, 24] and the energies of its inputs: the few large ones meet weights of ordinary size."""
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((64, 24)).astype(np.float32)
    energy = np.where(rng.random(64) < 0.1, 100.0, 0.1).astype(np.float32)
    return matrix, energy


def test_scales_are_fitted_to_the_inputs_that_matter(outlier_channels):
    matrix, energy = outlier_channels

    def block_errors(packed, scales):
        square = np.square(dequantise(packed, scales, 4, 64) - matrix) * energy[:, None]
        return square.reshape(2, BLOCK, 24).sum(1)

    plain = quantize_blocks(matrix, 4, BLOCK)
    before, after = block_errors(*plain), block_errors(*refine_int4(matrix, *plain, energy))
    assert (after <= before * (1 + 1e-5)).all()
    assert after.sum() < 0.5 * before.sum()


def test_blocks_of_zeros_and_silent_inputs_stay_what_they_are():
    matrix = np.zeros((64, 3), np.float32)
    matrix[:, 1] = np.linspace(-1, 1, 64)
    plain = quantize_blocks(matrix, 4, BLOCK)
    found = dequantise(*refine_int4(matrix, *plain, np.zeros(64, np.float32)), 4, 64)
    assert (found[:, [0, 2]] == 0).all()
    assert np.abs(found - matrix).max() < 0.1


def test_input_energies_are_those_of_the_graph_and_change_nothing_in_it(lowered, random_tokens, workshop):
    model = lowered("llama").model
    probed = model.clone()
    add_energy_outputs(probed)
    tokens = random_tokens(sum(STEPS))
    wanted = workshop.open(model, "model").feed_in(STEPS, tokens)
    graph = workshop.save(probed, "probed")
    assert np.array_equal(workshop.reopen("probed").feed_in(STEPS, tokens), wanted)

    energy = input_energy(Stepper(graph), 320, 128)
    products = list(constant_products(model.graph))
    assert set(energy) == {node.inputs[1].name for node in products}
    # The input of the first product is the first norm's output: a row of mean square one, times the norm's weight.
    first = products[0].inputs[0].producer()
    gain = next(v.const_value.numpy() for v in first.inputs if v.const_value is not None and len(v.shape) == 1)
    assert np.mean(energy[products[0].inputs[1].name] / gain**2) == pytest.approx(1, rel=0.01)


def test_energies_bring_the_quantised_model_nearer(lowered, llama_reference, workshop):
    model = lowered("llama").model
    louder = model.clone()
    norm = next(v for name, v in louder.graph.initializers.items() if "input_layernorm" in name)
    gain = norm.const_value.numpy().copy()
    gain[::13] *= 12
    norm.const_value = ir.tensor(gain, name=norm.name)
    probed = louder.clone()
    add_energy_outputs(probed)
    energy = input_energy(Stepper(workshop.save(probed, "probed")), 320, 128)
    wanted = run_graph(Stepper(workshop.save(louder, "louder")), llama_reference.tokens, llama_reference.chunks, 128)

    def divergence(name, energy):
        quantised = louder.clone()
        quantise(quantised, "int4", lambda *_: None, energy)
        found = run_graph(Stepper(workshop.save(quantised, name)), llama_reference.tokens, llama_reference.chunks, 128)
        return compare_logits(found, wanted).mean_kl

    assert divergence("fitted", energy) < 0.9 * divergence("plain", {})


def test_nothing_is_left_in_float_and_nothing_is_stored_twice(lowered):
    model = lowered("llama").model.clone()
    quantise(model, "int4", lambda *_: None)
    graph = model.graph
    assert not [n for n in graph if n.op_type in ("MatMul", "FusedMatMul")]
    large = {name: v for name, v in graph.initializers.items() if v.const_value.nbytes > 2048}
    sharing = {name for name, v in large.items() if SHARES_BYTES_OF in v.metadata_props}
    contents = [v.const_value.tobytes() for name, v in large.items() if name not in sharing]
    assert len(set(contents)) == len(contents)
    assert len(sharing) == 1
    rows = large[sharing.pop()]
    assert rows.const_value.tobytes() == large[rows.metadata_props[SHARES_BYTES_OF]].const_value.tobytes()


def test_embedding_rows_are_read_from_the_heads_own_table(lowered):
    model = lowered("llama").model.clone()
    quantise(model, "int4", lambda *_: None)
    lookup = next(n for n in model.graph if n.op_type == "GatherBlockQuantized")
    head = next(n for n in model.graph if n.op_type == "MatMulNBits" and n.outputs[0].name == "logits")
    assert lookup.inputs[0].metadata_props[SHARES_BYTES_OF] == head.inputs[1].name
    assert lookup.inputs[2] is head.inputs[2]


@pytest.mark.parametrize("bits", [4, 8])
def test_an_embedding_of_its_own_is_quantised_too(bits, lowered):
    model = lowered("llama-untied").model
    quantised = model.clone()
    QuantizePass(bits)(quantised)
    lookup = next(n for n in quantised.graph if n.op_type == "GatherBlockQuantized")
    assert lookup.inputs[0].shape == (320, 64 * bits // 8)
    assert_near(lookup, embedding_of(model).const_value.numpy())
    assert embedding_of(model).name not in quantised.graph.initializers


def test_a_slim_tier_keeps_fulls_embedding(lowered):
    model = lowered("llama-untied").model.clone()
    QuantizePass(8, only=list(constant_products(model.graph)))(model)
    assert embedding_of(model).const_value.dtype == ir.DataType.FLOAT


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3"])
def test_fusing_gate_and_up_changes_no_bit(family, lowered, random_tokens, workshop):
    tokens = random_tokens(sum(STEPS))
    model = lowered(family).model
    fused = model.clone()
    FuseGateUpPass()(fused)
    products = sum(n.op_type == "MatMul" for n in model.graph) - sum(n.op_type == "MatMul" for n in fused.graph)
    assert products == (0 if family == "phi3" else 4)  # phi3's checkpoint has them fused
    plain, same = workshop.open(model, "plain"), workshop.open(fused, "fused")
    difference = np.abs(plain.feed_in(STEPS, tokens) - same.feed_in(STEPS, tokens)).max()
    assert difference < 1e-5


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_tiers_of_a_quantised_model_agree_bit_for_bit(precision, lowered, random_tokens, workshop):
    tokens = random_tokens(sum(STEPS))
    mask = Mask.from_flags((True, False, True, False), (False, False, True, True))
    model = lowered("llama").model.clone()
    quantise(model, precision, lambda *_: None)
    segments = plan_segments([mask], 8)
    pruned, routed = model.clone(), model.clone()
    PrunePass(mask)(pruned)
    RoutePass(segments)(routed)
    one = workshop.open(routed, "routed")
    plain, slim = workshop.open(model, "plain"), workshop.open(pruned, "slim")
    assert np.array_equal(one.feed_in(STEPS, tokens), plain.feed_in(STEPS, tokens))
    one.rewind()
    assert np.array_equal(one.feed_in(STEPS, tokens, keep_vector(mask, segments)), slim.feed_in(STEPS, tokens))


@pytest.mark.parametrize("tied", [True, False])
def test_blocks_that_do_not_divide_the_hidden_size_end_in_padding(
    tied, tmp_path, new_checkpoint, random_tokens, workshop
):
    changes = {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 5, "tie_word_embeddings": tied}
    directory = new_checkpoint(tmp_path / "odd", "llama", **changes)
    with open_checkpoint(directory) as checkpoint:
        lower(checkpoint.model, checkpoint.config, 64)
        model = checkpoint.model
    quantised = model.clone()
    quantise(quantised, "int4", lambda *_: None, {"model.layers.0.mlp.gate_proj.weight": np.ones(80, np.float32)})
    lookup = next(n for n in quantised.graph if n.op_type == "GatherBlockQuantized")
    assert lookup.inputs[0].shape == (320, 40)
    assert_near(lookup, embedding_of(model).const_value.numpy())
    tokens = random_tokens(20)
    by_hand = dequantised_by_hand(model, quantised)
    wanted = workshop.open(by_hand, "by-hand").feed(tokens)
    found = workshop.open(with_accuracy_level(quantised, 0), "quantised").feed(tokens)
    assert np.abs(found - wanted).max() < 1e-4


def test_bits_other_than_four_and_eight_are_refused():
    with pytest.raises(ValueError, match="wanted 4 or 8"):
        QuantizePass(3)
