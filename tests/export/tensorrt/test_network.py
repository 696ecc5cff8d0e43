"""Every way known to build an engine that is wrong, or to fail to build one, is refused or avoided (no GPU needed)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.export.portable import to_portable
from via_sd.export.portable.constants import add, int64_constant
from via_sd.export.tensorrt.builder import BuildOptions, build_plan
from via_sd.export.tensorrt.library import Library, load_library
from via_sd.export.tensorrt.log import BuildLog
from via_sd.export.tensorrt.network import Network, parse_network
from via_sd.export.tensorrt.profiles import plan_profiles
from via_sd.export.tensorrt.weights import weights_as_inputs

pytest.importorskip("tensorrt_rtx", reason="needs the tensorrt-rtx extra")

CAPACITY = 128


@pytest.fixture(scope="module")
def library() -> Library:
    return load_library("tensorrt-rtx")


@pytest.fixture
def portable(lowered) -> Callable[..., ir.Model]:
    """A portable graph of a family."""

    def make(family: str = "llama", dtype: str = "fp16") -> ir.Model:
        return to_portable(lowered(family).model, max_seq_len=CAPACITY, dtype=dtype)

    return make


def parse(library: Library, model: ir.Model) -> Network:
    return parse_network(library, weights_as_inputs(model), BuildLog())


def options(*, separate: bool = False) -> BuildOptions:
    return BuildOptions(plan_profiles(None, None, CAPACITY, separate=separate))


def build(library: Library, model: ir.Model) -> bytes:
    return build_plan(library, weights_as_inputs(model), options(), BuildLog())


def attentions(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "Attention"]


# -- what builds --


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_a_portable_graph_builds_in_every_dtype(dtype, library, portable):
    assert len(build(library, portable(dtype=dtype))) > 100_000


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gemma3", "granite", "phi3", "smollm3"])
def test_families_with_bias_head_norms_windows_and_scales_build(family, library, portable):
    assert len(build(library, portable(family))) > 100_000


def test_a_soft_cap_which_tensorrt_has_not_is_refused_by_name(library, portable):
    with pytest.raises(UnsupportedModelError, match=r"(?i)softcap.*ONNX Runtime"):
        parse(library, portable("gemma2"))


def test_a_scale_of_its_own_reaches_the_network(library, portable):
    """Granite's 0.3: a parser that dropped it would leave attention to be far too sharp or too flat."""
    network = parse(library, portable("granite", dtype="fp32"))
    found = set()
    for layer in network.layers:
        if layer.type == library.module.LayerType.CONSTANT:
            layer.__class__ = library.module.IConstantLayer
            values = np.array(layer.weights)
            found |= {round(float(v), 4) for v in values.reshape(-1)} if values.size == 1 else set()
    assert 0.3 in found


def test_caches_are_updated_in_place_and_attention_has_a_mask_without_a_causal_flag(library, portable):
    trt = library.module
    network = parse(library, portable())
    updates = [layer for layer in network.layers if layer.type == trt.LayerType.KV_CACHE_UPDATE]
    assert sorted(layer.get_input(0).name for layer in updates) == sorted(
        f"past_key_values.{i}.{part}" for i in range(4) for part in ("key", "value")
    )
    for layer in updates:
        assert layer.get_output(0).name == layer.get_input(0).name.replace("past_key_values", "present")
    outputs = [layer for layer in network.layers if layer.type == trt.LayerType.ATTENTION_OUTPUT]
    assert len(outputs) == 4
    for layer in outputs:
        layer.__class__ = trt.IAttentionOutputLayer
        assert layer.attention.mask.dtype == trt.DataType.HALF
        assert layer.attention.causal_kind == trt.CausalMaskKind.NONE
        assert layer.attention.decomposable


# -- traps --


def test_lengths_that_the_parser_drops_are_noticed(library, portable):
    """`nonpad_kv_seqlen` is ignored without a word, and a causal flag left alone starts at slot 0 at every offset."""
    model = portable()
    nodes: list[ir.Node] = []
    lengths = add(nodes, "Add", [model.graph.inputs[0], int64_constant(model.graph, 1)], "lengths_2d")
    lengths = add(nodes, "Gather", [lengths, int64_constant(model.graph, 0)], "lengths", axis=1)
    model.graph.insert_before(model.graph[0], nodes)
    for node in attentions(model):
        node.resize_inputs(7)
        node.replace_input_with(3, None)
        node.replace_input_with(6, lengths)
        node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
    with pytest.raises(UnsupportedModelError, match=r"causal flag.*offset"):
        parse(library, model)


def test_a_causal_flag_alone_is_refused(library, portable):
    model = portable()
    for node in attentions(model):
        node.resize_inputs(3)
        node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
    with pytest.raises(UnsupportedModelError, match=r"causal flag.*offset"):
        parse(library, model)


def test_a_causal_flag_on_top_of_the_mask_is_refused(library, portable):
    model = portable()
    for node in attentions(model):
        node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
    with pytest.raises(UnsupportedModelError, match="causal"):
        parse(library, model)


def test_an_attention_without_a_mask_is_refused(library, portable):
    model = portable()
    for node in attentions(model):
        node.resize_inputs(3)
    with pytest.raises(UnsupportedModelError, match="no mask"):
        parse(library, model)


def test_a_boolean_mask_as_an_input_is_refused(library, portable):
    model = portable()
    mask = ir.Value(
        name="mask", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape(["batch", 1, "stacked", "visible"])
    )
    model.graph.inputs.append(mask)
    for node in attentions(model):
        node.replace_input_with(3, mask)
    with pytest.raises(UnsupportedModelError, match="'mask' is boolean"):
        parse(library, model)


def test_float32_attention_is_built_because_it_may_be_decomposed(library, portable):
    model = portable(dtype="fp32")
    network = parse(library, model)
    for layer in network.layers:
        if layer.type == library.module.LayerType.ATTENTION_OUTPUT:
            layer.__class__ = library.module.IAttentionOutputLayer
            layer.attention.decomposable = False
    config = network.builder.create_builder_config()
    profile = network.builder.create_optimization_profile()
    for tensor in network.inputs:
        if -1 in tuple(tensor.shape):
            most = 1 if tensor.name.startswith("past_key_values.") else 64
            small, large = (tuple(n if size == -1 else size for size in tensor.shape) for n in (1, most))
            if len(small) == 2:
                large = (1, most)  # one sequence of several tokens
            profile.set_shape(tensor.name, small, large, large)
    config.add_optimization_profile(profile)
    assert network.builder.build_serialized_network(network.definition, config) is None
    assert len(build(library, model)) > 100_000


def test_the_exported_graph_itself_needs_plugins_that_are_not_there(library, lowered):
    exported = ir.to_proto(lowered("llama").model).SerializeToString()
    with pytest.raises(UnsupportedModelError, match=r"tensorrt_rtx .* cannot read this model"):
        parse_network(library, exported, BuildLog())


def test_a_cache_inside_a_branch_is_refused(library):
    cache = helper.make_tensor_value_info("past_key_values.0.key", TensorProto.FLOAT16, [1, 2, CAPACITY, 16])
    update = helper.make_tensor_value_info("update", TensorProto.FLOAT16, [1, 2, 4, 16])
    index = helper.make_tensor_value_info("index", TensorProto.INT64, [1])
    keep = helper.make_tensor_value_info("keep", TensorProto.BOOL, [])
    present = helper.make_tensor_value_info("present.0.key", TensorProto.FLOAT16, [1, 2, CAPACITY, 16])

    def branch(name: str, node: onnx.NodeProto) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT16, [1, 2, CAPACITY, 16])
        return helper.make_graph([node], name, [], [out])

    scatter = helper.make_node("TensorScatter", [cache.name, update.name, index.name], ["then_out"], axis=2)
    node = helper.make_node(
        "If",
        ["keep"],
        ["present.0.key"],
        then_branch=branch("then", scatter),
        else_branch=branch("else", helper.make_node("Identity", [cache.name], ["else_out"])),
    )
    graph = helper.make_graph([node], "g", [cache, update, index, keep], [present])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    with pytest.raises(UnsupportedModelError):
        parse_network(library, model.SerializeToString(), BuildLog())


def test_a_cache_that_is_not_the_output_itself_is_refused(library, portable):
    model = portable()
    graph = model.graph
    present = next(v for v in graph.outputs if v.name == "present.0.key")
    nodes: list[ir.Node] = []
    doubled = add(nodes, "Add", [present, present], "doubled")
    graph.append(nodes[0])
    doubled.type, doubled.shape = present.type, present.shape
    graph.outputs[list(graph.outputs).index(present)] = doubled
    with pytest.raises(UnsupportedModelError):
        parse(library, model)


def test_a_gpu_without_kernels_is_refused_with_the_way_out(library):
    with pytest.raises(ExportError, match=r"9\.0, only for 7\.5, 8\.0.*CUDA provider"):
        library.capabilities(["8.9", "9.0"])
    assert library.capabilities() == ("8.0", "8.6", "8.9", "12.0", "12.1")


def test_a_listed_capability_builds(library, portable):
    plan = build_plan(
        library,
        weights_as_inputs(portable()),
        BuildOptions(
            plan_profiles(None, None, CAPACITY, separate=False), capabilities=library.capabilities(["7.5", "8.9"])
        ),
        BuildLog(),
    )
    assert len(plan) > 100_000
