"""A decoder that another exporter wrote as ONNX: a directory of the ONNX Runtime GenAI model builder, or of Olive.

There is no checkpoint behind it: what the graph says of itself becomes the configuration the exporter reads, completed
by `genai_config.json`, or by `config.json` where one lies beside it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import onnx_ir as ir

from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.export.passes.attention_semantics import AttentionSemantics, semantics_of
from via_sd.export.sources.checkpoint import GENAI_CONFIG, Checkpoint, identify, read_config
from via_sd.export.sources.foreign_graph import ADVICE, Declared, ForeignDecoder, adopt
from via_sd.export.writer.endings import token_ids
from via_sd.export.writer.weights import INLINE_BYTES

MODEL_CONFIG = "config.json"
_DEFAULT_FILE = "model.onnx"
#: Entries of the builder's configuration that stand for models besides the decoder.
_OTHER_MODELS = ("encoder", "embedding", "vision", "speech")


def open_onnx_decoder(directory: Path) -> Checkpoint:
    """Load the decoder in `directory`, in the form a frontend gives it.

    Raises:
        ExportError: a missing or damaged file.
        UnsupportedModelError: a graph that is no decoder this exporter can take, or that is not the model its
            configuration describes.
    """
    genai = read_config(directory / GENAI_CONFIG) if (directory / GENAI_CONFIG).is_file() else {}
    facts = _single_decoder(directory, genai) if genai else {}
    decoder = facts.get("decoder", {})
    file = _graph_file(directory, decoder.get("filename"))
    if not genai and not (directory / MODEL_CONFIG).is_file():
        raise ExportError(
            f"{directory} has neither {GENAI_CONFIG} nor {MODEL_CONFIG}; wanted one of them beside {file.name}, for "
            "the model's type, its limit in tokens and its end-of-sequence tokens"
        )
    model = _load(file)
    model.graph.name = "decoder"
    said = {**(decoder.get("inputs") or {}), **(decoder.get("outputs") or {}), **decoder}
    found = adopt(file, model, Declared(**{f.name: said[f.name] for f in fields(Declared) if f.name in said}))
    config = _config_of(file, found)
    if genai:
        config = _with_genai(directory / GENAI_CONFIG, config, facts)
    if (directory / MODEL_CONFIG).is_file():
        config = _with_model_config(directory / MODEL_CONFIG, file, config)
    return Checkpoint(model, directory, config, identify(model, config), found.precision, found.source)


def _single_decoder(directory: Path, genai: Mapping[str, Any]) -> dict[str, Any]:
    """The section `model` of the builder's configuration."""
    model = genai.get("model")
    decoder = model.get("decoder") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(decoder, dict):
        raise UnsupportedModelError(f"{directory / GENAI_CONFIG} describes no decoder; wanted model.decoder; {ADVICE}")
    others = [name for name in _OTHER_MODELS if name in model] + (["a pipeline"] if "pipeline" in decoder else [])
    if others:
        raise UnsupportedModelError(
            f"{directory / GENAI_CONFIG} describes {', '.join(others)} besides a decoder; wanted a decoder alone, from "
            f"tokens to logits; {ADVICE}"
        )
    return model


def _graph_file(directory: Path, named: str | None) -> Path:
    file = directory / (named or _DEFAULT_FILE)
    if not file.is_file():
        present = ", ".join(sorted(path.name for path in directory.glob("*.onnx"))) or "none"
        raise ExportError(
            f"{directory} has no {file.name} (its graphs: {present}); wanted one decoder, named in {GENAI_CONFIG} or "
            f"called {_DEFAULT_FILE}; {ADVICE}"
        )
    return file


def _load(file: Path) -> ir.Model:
    try:
        model = ir.load(file)
    except Exception as error:  # noqa: BLE001 - a damaged file makes protobuf and the reader raise what they like
        raise ExportError(f"{file} is damaged ({type(error).__name__}: {error}); fetch or export it again") from None
    if not len(model.graph):
        raise ExportError(f"{file} is damaged (a graph without nodes); fetch or export it again")
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            _check_external(file, tensor)
            if tensor.nbytes <= INLINE_BYTES:  # ours keep those in the graph
                value.const_value = ir.tensor(tensor.numpy().copy(), name=tensor.name)
    return model


def _check_external(file: Path, tensor: ir.ExternalTensor) -> None:
    place = Path(os.path.normpath(file.parent / tensor.location))
    if not place.is_relative_to(os.path.normpath(file.parent)):
        raise ExportError(f"{file} keeps weights in {tensor.location}; wanted a file beside it, or below")
    if not place.is_file():
        raise ExportError(f"{file} keeps its weights in {place.name}, which is not there; copy both files together")
    if not place.resolve().is_relative_to(file.parent.resolve()) or place.stat().st_nlink > 1:
        raise ExportError(f"{place} is a link, and weights are read from plain files only; copy the directory (cp -rL)")
    size, wanted = place.stat().st_size, (tensor.offset or 0) + (tensor.length or 0)
    if size < wanted:
        raise ExportError(
            f"{place} is cut short: it has {size} bytes, wanted {wanted} for weight {tensor.name}; fetch it again"
        )


def _config_of(file: Path, found: ForeignDecoder) -> dict[str, Any]:
    """What the graph says, in the words of a Hugging Face configuration, so that `semantics_of` gives it back."""
    windows = {layer.window for layer in found.attention if layer.window > 0}
    scales, caps = {layer.scale for layer in found.attention}, {layer.softcap for layer in found.attention}
    if max(len(windows), len(scales), len(caps)) > 1:
        raise UnsupportedModelError(
            f"{file} has attention that differs from layer to layer in the size of its window, its scale or its soft "
            f"cap; wanted one of each; {ADVICE}"
        )
    return {
        **found.sizes,
        "sliding_window": windows.pop() if windows else None,
        "layer_types": ["sliding_attention" if s.window > 0 else "full_attention" for s in found.attention],
        "attention_multiplier": scales.pop(),
        "attn_logit_softcapping": caps.pop(),
    }


def _with_genai(path: Path, config: dict[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    decoder = facts["decoder"]
    stated = {
        "num_hidden_layers": decoder.get("num_hidden_layers"),
        "hidden_size": decoder.get("hidden_size"),
        "vocab_size": facts.get("vocab_size"),
    }
    _check_sizes(path, config, stated)
    limits = [n for n in (config.get("max_position_embeddings"), facts.get("context_length")) if n is not None]
    return {
        **config,
        "model_type": facts.get("type", "unknown"),
        "max_position_embeddings": min(limits, default=None),
        "eos_token_id": facts.get("eos_token_id"),
    }


def _with_model_config(path: Path, file: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration in `path`, once it is found to say of the graph what the graph does."""
    sizes = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "head_dim")
    stated = {**{key: config[key] for key in sizes}, **read_config(path)}
    _check_sizes(path, config, stated)
    limit = int(stated.get("max_position_embeddings") or config.get("max_position_embeddings") or 0)
    for layer, (graph, wanted) in enumerate(zip(semantics_of(config), semantics_of(stated), strict=True)):
        if not _same(graph, wanted, limit):
            raise UnsupportedModelError(
                f"{file} and {path} disagree on the attention of layer {layer}: {_words(graph)} in the graph, "
                f"{_words(wanted)} in the configuration; export from the Hugging Face checkpoint, or take "
                f"{path.name} away to have the graph as it is"
            )
    limits = [n for n in (config.get("max_position_embeddings"), limit) if n]
    ends = [*token_ids(config.get("eos_token_id")), *token_ids(stated.get("eos_token_id"))]
    return {**stated, "max_position_embeddings": min(limits, default=None), "eos_token_id": list(dict.fromkeys(ends))}


def _check_sizes(path: Path, graph: Mapping[str, Any], stated: Mapping[str, Any]) -> None:
    for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if stated.get(key) not in (None, graph[key]):
            raise UnsupportedModelError(
                f"{path} says {key} {stated[key]}, the graph has {graph[key]}; wanted the configuration of this model"
            )


def _same(graph: AttentionSemantics, wanted: AttentionSemantics, limit: int) -> bool:
    """Whether two attentions are one: a window that no text can reach is none."""

    def window(layer: AttentionSemantics) -> int:
        return layer.window if 0 < layer.window < limit else -1

    return (
        window(graph) == window(wanted)
        and math.isclose(graph.scale, wanted.scale, rel_tol=1e-4)
        and math.isclose(graph.softcap, wanted.softcap, rel_tol=1e-4)
    )


def _words(layer: AttentionSemantics) -> str:
    window = f"a window of {layer.window}" if layer.window > 0 else "no window"
    return f"{window}, scale {layer.scale:.4g}, soft cap {layer.softcap:g}"
