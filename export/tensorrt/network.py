"""Read a portable graph into a TensorRT network, and refuse what would build and be wrong, or fail without saying why.

A parser that drops an attention's lengths, or a causal flag that ignores where a step stands in the cache, gives an
engine that runs and computes something else. So a network is looked at before anything is built from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.export.tensorrt.library import Library
from via_sd.export.tensorrt.log import BuildLog


@dataclass(frozen=True)
class Network:
    """A parsed network and what must outlive it."""

    builder: Any
    definition: Any
    parser: Any

    @property
    def inputs(self) -> list[Any]:
        return [self.definition.get_input(i) for i in range(self.definition.num_inputs)]

    @property
    def outputs(self) -> list[Any]:
        return [self.definition.get_output(i) for i in range(self.definition.num_outputs)]

    @property
    def layers(self) -> list[Any]:
        return [self.definition.get_layer(i) for i in range(self.definition.num_layers)]


def parse_network(library: Library, graph: bytes | str, log: BuildLog) -> Network:
    """Parse a serialised graph, or a graph file whose weights lie beside it.

    Raises:
        UnsupportedModelError: an operator or attribute the library's parser does not take, or a network that would not
            compute what the graph says (`check_network`).
    """
    trt = library.module
    logger = log.logger(library)
    builder = trt.Builder(logger)
    if builder is None:
        raise ExportError(f"{library.name} {library.version} cannot start a build; {log.last_error()}")
    definition = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(definition, logger)
    parsed = parser.parse(graph) if isinstance(graph, bytes) else parser.parse_from_file(graph)
    if not parsed:
        errors = dict.fromkeys(
            f"{parser.get_error(i).node_operator()}: {parser.get_error(i).desc()}" for i in range(parser.num_errors)
        )
        raise UnsupportedModelError(
            f"{library.name} {library.version} cannot read this model: {'; '.join(errors) or log.last_error()}; "
            "run it with ONNX Runtime instead"
        )
    network = Network(builder, definition, parser)
    check_network(library, network)
    return network


def check_network(library: Library, network: Network) -> None:
    """Refuse networks that build wrong or not at all, and let attention without a fused kernel be decomposed.

    Raises:
        UnsupportedModelError: a boolean input; control flow; a KV cache that is not a network input and output; an
            attention without a mask of its own, or with a causal flag, neither of which knows at which offset a step
            stands.
    """
    trt = library.module
    for tensor in network.inputs:
        if tensor.dtype == trt.DataType.BOOL:
            raise UnsupportedModelError(
                f"input {tensor.name!r} is boolean, which does not build once two layers share it; "
                "make a mask in the graph, as a float that is added"
            )
    branches = [layer.name for layer in network.layers if "CONDITION" in layer.type.name]
    if branches:
        raise UnsupportedModelError(f"layers {branches[:2]} are control flow, inside which no KV cache can be updated")
    caches = [layer for layer in network.layers if layer.type == trt.LayerType.KV_CACHE_UPDATE]
    for layer in caches:
        if not layer.get_input(0).is_network_input or not layer.get_output(0).is_network_output:
            raise UnsupportedModelError(f"KV cache of {layer.name!r} is not a direct input and output of the network")
    attentions = [layer for layer in network.layers if layer.type == trt.LayerType.ATTENTION_OUTPUT]
    if not attentions or len(caches) != 2 * len(attentions):
        raise UnsupportedModelError(
            f"found {len(attentions)} attentions and {len(caches)} KV cache updates, wanted two updates for each"
        )
    for layer in attentions:
        # The binding hands out the base class; the concrete one has the attention itself.
        layer.__class__ = trt.IAttentionOutputLayer
        attention = layer.attention
        if attention.mask is None:  # where there is one the library refuses a causal flag itself
            raise UnsupportedModelError(
                f"attention {attention.name!r} has {'a causal flag' if attention.causal else 'no mask'}; wanted an "
                "additive mask and no causal flag, which would be wrong at every offset"
            )
        attention.decomposable = True
