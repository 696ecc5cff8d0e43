"""Runs of layers of a portable graph as graphs and plans of their own: the alternative to one engine a tier."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import onnx_ir as ir

from via_sd.export.tensorrt.library import Library
from via_sd.export.tensorrt.log import BuildLog
from via_sd.export.tensorrt.network import parse_network

#: (min, opt, max) of the dimensions that vary, in a plan of a segment.
SIZES = {"batch": (1, 1, 1), "tokens": (1, 8, 64), "rows": (1, 8, 64), "visible": (1, 256, 1024)}


def cut_before(model: ir.Model, layers: Sequence[int], hidden: int) -> list[ir.Model]:
    """The segments of a portable graph that begin at layer 0 and at each of `layers`, linked by the residual stream."""
    graph = model.clone().graph
    norms = [node for node in graph if node.op_type == "RMSNormalization"]  # two a layer, and the last
    streams = []
    for layer in layers:
        stream = norms[2 * layer].inputs[0]
        assert stream is not None
        dtype = graph.initializers[norms[0].inputs[1].name].dtype  # type: ignore[union-attr]
        stream.type, stream.shape = ir.TensorType(dtype), ir.Shape(["batch", "tokens", hidden])
        streams.append(stream)
    bounds = [0, *layers, len(norms) // 2]
    segments = []
    for index, (start, stop) in enumerate(pairwise(bounds)):
        own = [f"{{}}.{layer}.{part}" for layer in range(start, stop) for part in ("key", "value")]
        inputs = ["position_ids", "cache_slots", *(name.format("past_key_values") for name in own)]
        outputs = [name.format("present") for name in own]
        inputs.append(streams[index - 1].name or "" if start else "input_ids")
        outputs.append(streams[index].name or "" if index < len(streams) else "logits")
        if index == len(streams):
            inputs.append("logit_rows")
        part = ir.convenience.extract(graph, inputs, outputs)
        segments.append(ir.Model(part, ir_version=model.ir_version))
    return segments


def build_segment(library: Library, model: ir.Model) -> bytes:
    """A plan of a segment with its weights."""
    network = parse_network(library, ir.to_proto(model).SerializeToString(), BuildLog())
    config = network.builder.create_builder_config()
    profile = network.builder.create_optimization_profile()
    for value in model.graph.inputs:
        sizes = [SIZES[str(d.value)] if not isinstance(d, int) else (d, d, d) for d in value.shape or ()]
        profile.set_shape(value.name, *zip(*sizes, strict=True))
    config.add_optimization_profile(profile)
    return bytes(network.builder.build_serialized_network(network.definition, config))
