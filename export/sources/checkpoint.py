"""From a checkpoint to a decoder graph: Hugging Face directories, hub ids and GGUF files, through mobius-onnx.

A directory with a decoder that another exporter made is opened here too, and read by `onnx_decoder`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.export.failures import one_message
from via_sd.export.passes.residual import find_sublayers
from via_sd.export.sources.accounting import check_accounts
from via_sd.export.sources.frontend import build_graph
from via_sd.export.sources.model_config import CONFIG_FILE, read_raw_config, resolve_config
from via_sd.export.sources.model_kind import check_kind, check_no_adapter
from via_sd.export.sources.reference import load_reference, reference_of
from via_sd.export.sources.source_graph import SourceGraph
from via_sd.export.sources.weight_files import WeightFiles
from via_sd.files import read_json_object, scratch_directory
from via_sd.masks import ModelIdentity
from via_sd.progress import Progress, no_progress

#: Describes a decoder of the ONNX Runtime GenAI model builder.
GENAI_CONFIG = "genai_config.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as a decoder graph, and the directory its configuration and tokenizer came from.

    Attributes:
        model: graph for the CPU provider (GroupQueryAttention, packed QKV), inputs as mobius names them.
        directory: Hugging Face directory; for a GGUF file a temporary one with its configuration and tokenizer.
        config: its configuration, with the defaults of its class.
        identity: what masks and bundles call this model by.
        precision: `int8` or `int4` when the weights are quantised already, None when they are float32.
        source: when another exporter made the graph, the graph as it came; there is then no `reference`.
        reference: loads the model in transformers: float32, eager attention.
    """

    model: ir.Model
    directory: Path
    config: dict[str, Any]
    identity: ModelIdentity
    precision: str | None = None
    source: SourceGraph | None = None
    reference: Callable[[], Any] | None = None


def is_onnx_directory(directory: Path) -> bool:
    """Whether `directory` holds a decoder that another exporter made, rather than a checkpoint."""
    return not any(directory.glob("*.safetensors")) and (
        (directory / GENAI_CONFIG).is_file() or any(directory.glob("*.onnx"))
    )


@contextlib.contextmanager
def open_checkpoint(source: str | Path, progress: Progress = no_progress) -> Iterator[Checkpoint]:
    """The checkpoint at `source`: a Hugging Face directory, a GGUF file, a hub id, or a directory with an ONNX decoder.

    What kind of file it is, and that all of it is used, is checked before any work (see `docs/sources.md`).

    Raises:
        ExportError: nothing usable at `source`, a damaged file, or one of which something would be left out.
        UnsupportedModelError: another kind of model, or an architecture that cannot be exported or pruned.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet())
        yield _open(Path(source), str(source), progress, stack)


def _open(path: Path, name: str, progress: Progress, stack: contextlib.ExitStack) -> Checkpoint:
    _check_packages()
    if path.is_dir() and is_onnx_directory(path):
        from via_sd.export.sources.onnx_decoder import open_onnx_decoder

        progress("reading the graph", None)
        with one_message(f"the ONNX decoder in {path} cannot be read"):
            return open_onnx_decoder(path)
    if path.is_dir():
        return _open_directory(path, progress)
    if path.is_file():
        if path.suffix == ".onnx":
            raise ExportError(f"{path} is a graph alone; give the directory with its configuration and tokenizer")
        return _open_gguf(path, stack.enter_context(scratch_directory("via-sd-gguf-")), progress)
    if path.exists():
        raise ExportError(f"{path} is neither a directory nor a regular file; wanted {_WANTED}")
    return _open_directory(_download(name), progress)


def _open_directory(directory: Path, progress: Progress) -> Checkpoint:
    check_no_adapter(directory)
    if not (directory / CONFIG_FILE).is_file():
        raise ExportError(f"{directory} has no config.json; wanted {_WANTED}")
    progress("reading the checkpoint", None)
    raw = read_raw_config(directory)
    check_kind(directory, raw)
    weights = WeightFiles(directory)
    config = resolve_config(directory, raw, weights)
    names = check_accounts(directory, weights, config.resolved)
    notes = config.notes + tuple(f"{name} is not read: no part of the checkpoint" for name in weights.unread)
    # Tokens that end a text are those the file names: a class's defaults are another model's.
    ends = {key: raw.get(key) for key in ("eos_token_id", "bos_token_id", "pad_token_id")}
    tensors = {name: weights[name] for name in names}
    reference = functools.partial(load_reference, directory)
    return _checkpoint(directory, config.transformers, ends, tensors, reference, notes, progress)


def _open_gguf(path: Path, directory: Path, progress: Progress) -> Checkpoint:
    from via_sd.export.sources.gguf.model import open_gguf_model

    progress("reading GGUF", None)
    with one_message(f"{path} cannot be read"):
        model = open_gguf_model(path, directory)
        ends = {"eos_token_id": model.config.eos_token_id, "bos_token_id": model.config.bos_token_id}
        tensors = dict(model.tensors)
    reference = functools.partial(reference_of, model.config, tensors)
    return _checkpoint(directory, model.config, ends, tensors, reference, model.notes, progress, name=str(path))


def _checkpoint(
    directory: Path,
    config: Any,
    ends: dict[str, Any],
    tensors: Mapping[str, Any],
    reference: Callable[[], Any],
    notes: tuple[str, ...],
    progress: Progress,
    name: str = "",
) -> Checkpoint:
    for note in notes:
        warnings.warn(note, stacklevel=2)
    progress("building the graph", None)
    model = build_graph(name or str(directory), config, tensors)
    model.graph.name = "decoder"  # instead of where the checkpoint lay
    described = {**config.to_dict(), **ends}
    return Checkpoint(model, directory, described, identify(model, described), reference=reference)


def _check_packages() -> None:
    """They are looked for, not imported: that takes seconds, and a path with nothing there is refused at once."""
    for name in ("mobius", "torch", "transformers"):
        try:
            found = importlib.util.find_spec(name) is not None
        except ImportError:
            found = False
        if not found:
            raise ExportError(f"exporting needs {name}, which is not installed: pip install 'via-sd-export[export]'")


def identify(model: ir.Model, config: dict[str, Any]) -> ModelIdentity:
    """Name the model by its shape and a hash of its normalisation weights (float32, in order of execution)."""
    sublayers = find_sublayers(model.graph)
    digest = hashlib.sha256()
    digest.update(json.dumps([config.get(k) for k in _SHAPE_KEYS]).encode())
    for sublayer in sublayers:
        weight = _norm_weight(sublayer.norm.inputs[2 if sublayer.before.delta is not None else 1])
        if weight is None:
            raise UnsupportedModelError(f"the norm of layer {sublayer.layer} has no constant weight")
        digest.update(np.ascontiguousarray(weight.numpy(), dtype="<f4").tobytes())
    return ModelIdentity(
        model_type=str(config.get("model_type", "unknown")),
        num_layers=len(sublayers) // 2,
        hidden_size=int(config["hidden_size"]),
        vocab_size=int(config["vocab_size"]),
        fingerprint=digest.hexdigest()[:32],
    )


def _norm_weight(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The weight of a norm as the checkpoint stores it; some families (Gemma) store it less one and add that here."""
    if value is None or value.const_value is not None:
        return None if value is None else value.const_value
    producer = value.producer()
    stored = [v.const_value for v in producer.inputs if v is not None] if producer is not None else []
    vectors = [tensor for tensor in stored if tensor is not None and len(tensor.shape) == 1]
    return vectors[0] if None not in stored and len(vectors) == 1 else None


_WANTED = "a Hugging Face model directory, a GGUF file, a hub id, or a directory with an ONNX decoder"
_SHAPE_KEYS = ("model_type", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")


def read_config(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; of a composite's configuration, that of its text model."""
    config = read_json_object(file, ExportError)
    text = config.get("text_config")
    return text if isinstance(text, dict) and "hidden_size" in text else config


def _download(name: str) -> Path:
    looks_like_hub_id = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if not looks_like_hub_id:
        raise ExportError(f"{name} does not exist; wanted {_WANTED}")
    from huggingface_hub import snapshot_download

    try:
        found = Path(snapshot_download(name, allow_patterns=["*.json", "*.jinja", "*.safetensors", "tokenizer*"]))
    except Exception as error:  # noqa: BLE001 - network, authorisation and naming errors all mean the same here
        raise ExportError(
            f"{name} is no local path and cannot be fetched from the hub ({type(error).__name__}: {error})"
        ) from None
    if not any(found.glob("*.safetensors")):
        raise ExportError(
            f"{name} on the hub has no *.safetensors file; a GGUF file or an ONNX decoder has to be on disk first: "
            f"hf download {name} --local-dir DIRECTORY"
        )
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the libraries that build and rewrite the graph from logging their inner steps."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(previous)
