"""mobius-onnx: from a configuration and its tensors to a decoder graph, with every tensor in it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.export.failures import one_message
from via_sd.export.sources.weight_files import is_buffer

if TYPE_CHECKING:
    import torch

#: Ends of the names of an attention's output bias.
_OUTPUT_BIASES = (".o_proj.bias", ".out_proj.bias", ".c_proj.bias", ".dense.bias", ".wo.bias")

#: Types of models whose rotary embedding pairs neighbours, which the frontend does not know of them.
_INTERLEAVED = ("ernie4_5",)
#: Types of models that the frontend builds otherwise than transformers runs them.
_BUILT_OTHERWISE = {
    "hunyuan_v1_dense": "it normalises queries and keys before the rotary embedding, not behind it",
}


def build_graph(source: str, config: Any, tensors: Mapping[str, torch.Tensor]) -> ir.Model:
    """The decoder graph for the CPU provider, float32, as mobius-onnx builds it.

    Args:
        source: what messages call the checkpoint.
        config: configuration object of transformers.
        tensors: every weight, under its name in transformers.

    Raises:
        ExportError: the graph has a weight that `tensors` does not, or `tensors` one that the graph does not.
        UnsupportedModelError: mobius-onnx has no such decoder.
    """
    import mobius

    kind = str(config.model_type)
    if kind not in mobius.registry:
        raise UnsupportedModelError(f"mobius-onnx cannot build {source}: it has no model of type {kind}")
    if kind in _BUILT_OTHERWISE:
        raise UnsupportedModelError(f"mobius-onnx builds models of type {kind} wrong: {_BUILT_OTHERWISE[kind]}")
    # mobius draws progress bars of its own.
    with one_message(f"mobius-onnx cannot build {source}", UnsupportedModelError), _hidden_stderr():
        factory = mobius.registry.get(kind)
        task = mobius.registry.get_task(kind) or getattr(factory, "default_task", "text-generation")
        if task != "text-generation":
            raise UnsupportedModelError(f"{source} is not a causal language model (mobius-onnx builds it for {task})")
        described = _describe(mobius, factory, kind, config, tensors)
        module = factory(described)
        package = mobius.build_from_module(module, described, task, execution_provider="cpu")
    if "model" not in package:
        raise UnsupportedModelError(f"{source} is not a causal language model (its parts: {', '.join(package)})")
    read = {name: tensors[name] for name in tensors if not is_buffer(name)}
    stored = _elements(read)
    with one_message(f"mobius-onnx cannot place the weights of {source}", UnsupportedModelError), _hidden_stderr():
        placed = module.preprocess_weights(dict(read)) if hasattr(module, "preprocess_weights") else read
    _check_kept(source, package["model"].graph, placed, stored)
    with one_message(f"mobius-onnx cannot place the weights of {source}", UnsupportedModelError), _hidden_stderr():
        package.apply_weights(placed, prefix_map=getattr(module, "weight_prefix_map", None))
    model: ir.Model = package["model"]
    missing = [name for name, value in model.graph.initializers.items() if value.const_value is None]
    if missing:
        raise ExportError(f"{source} lacks weights for {', '.join(missing[:3])} ({len(missing)} in all)")
    return model


def _describe(mobius: Any, factory: Any, kind: str, config: Any, names: Iterable[str]) -> Any:
    """The configuration in the frontend's own terms, float32, of a model whose weights are called `names`."""
    described = getattr(factory, "config_class", None)
    if described is None or described is mobius.ArchitectureConfig:
        described = mobius.registry.get_config_class(kind) or mobius.ArchitectureConfig
    found = dataclasses.replace(described.from_transformers(config, parent_config=config), dtype=ir.DataType.FLOAT)
    if found.attn_o_bias and not any(name.endswith(_OUTPUT_BIASES) for name in names):
        # `attention_bias` is about query, key and value alone in some families.
        found = dataclasses.replace(found, attn_o_bias=False)
    if kind in _INTERLEAVED:
        found = dataclasses.replace(found, rope_interleave=True)
    return found


def _check_kept(source: str, graph: ir.Graph, placed: Mapping[str, torch.Tensor], stored: int) -> None:
    """Every element of every tensor that was read has a place in the graph."""
    taken = {name: tensor for name, tensor in placed.items() if name in graph.initializers}
    shared = {tensor.data_ptr() for tensor in taken.values()}  # a head that is the embedding has no place of its own
    foreign = sorted(name for name in placed.keys() - taken.keys() if placed[name].data_ptr() not in shared)
    if foreign:
        raise UnsupportedModelError(
            f"mobius-onnx has no place for {', '.join(foreign[:3])} of {source} ({len(foreign)} tensors): it would "
            "leave them out"
        )
    if _elements(taken) != stored:
        raise UnsupportedModelError(
            f"mobius-onnx takes {_elements(taken)} of the {stored} weights of {source}: it would leave the others out"
        )


def _elements(tensors: Mapping[str, torch.Tensor]) -> int:
    """Number of weights; tensors that share their place in memory count once."""
    return sum({(tensor.data_ptr(), tensor.numel()): tensor.numel() for tensor in tensors.values()}.values())


@contextlib.contextmanager
def _hidden_stderr() -> Any:
    with contextlib.redirect_stderr(io.StringIO()):
        yield
