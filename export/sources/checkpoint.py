"""From a checkpoint to a decoder graph: Hugging Face directories, hub ids and GGUF files, through mobius-onnx.

A directory with a decoder that another exporter made is opened here too, and read by `onnx_decoder`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir

from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.export.passes.residual import find_sublayers
from via_sd.export.sources.plain_files import plain_directory
from via_sd.export.sources.source_graph import SourceGraph
from via_sd.files import read_json
from via_sd.masks import ModelIdentity
from via_sd.progress import Progress, no_progress

#: Describes a decoder of the ONNX Runtime GenAI model builder.
GENAI_CONFIG = "genai_config.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as a decoder graph, and the directory its configuration and tokenizer came from.

    Attributes:
        model: graph for the CPU provider (GroupQueryAttention, packed QKV), inputs as mobius names them.
        directory: Hugging Face directory; for a GGUF file the temporary one it was converted to.
        config: contents of `config.json` (of the text model, for a composite).
        identity: what masks and bundles call this model by.
        precision: `int8` or `int4` when the weights are quantised already, None when they are float32.
        source: when another exporter made the graph, the graph as it came; there is then no model for transformers.
    """

    model: ir.Model
    directory: Path
    config: dict[str, Any]
    identity: ModelIdentity
    precision: str | None = None
    source: SourceGraph | None = None


def is_onnx_directory(directory: Path) -> bool:
    """Whether `directory` holds a decoder that another exporter made, rather than a checkpoint."""
    return not any(directory.glob("*.safetensors")) and (
        (directory / GENAI_CONFIG).is_file() or any(directory.glob("*.onnx"))
    )


@contextlib.contextmanager
def open_checkpoint(source: str | Path, progress: Progress = no_progress) -> Iterator[Checkpoint]:
    """The checkpoint at `source`: a Hugging Face directory, a GGUF file, a hub id, or a directory with an ONNX decoder.

    Raises:
        ExportError: nothing usable at `source`, or a damaged file.
        UnsupportedModelError: an architecture that cannot be exported or pruned.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet())
        path = Path(source)
        if path.is_dir() and is_onnx_directory(path):
            from via_sd.export.sources.onnx_decoder import open_onnx_decoder

            progress("reading the graph", None)
            yield open_onnx_decoder(path)
            return
        if path.is_file():
            if path.suffix == ".onnx":
                raise ExportError(f"{path} is a graph alone; give the directory with its configuration and tokenizer")
            from via_sd.export.sources.gguf import gguf_to_directory

            target = Path(stack.enter_context(TemporaryDirectory(prefix="via-sd-gguf-")))
            progress("reading GGUF", None)
            gguf_to_directory(path, target)
            directory = target
        elif path.is_dir():
            directory = path
        else:
            directory = _download(str(source))
        config = _read_config(directory)
        progress("building the graph", None)
        model = _build(directory, stack.enter_context(plain_directory(directory)))
        model.graph.name = "decoder"  # instead of where the checkpoint lay
        yield Checkpoint(model, directory, config, identify(model, config))


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


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    if not file.is_file():
        raise ExportError(f"{directory} has no config.json; wanted {_WANTED}")
    return read_config(file)


def read_config(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; of a composite's configuration, that of its text model."""
    try:
        config = read_json(file)
    except ValueError as error:
        raise ExportError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ExportError(f"{file} holds {type(config).__name__}, wanted an object")
    text = config.get("text_config")
    return text if isinstance(text, dict) and "hidden_size" in text else config


def _build(directory: Path, plain: Path) -> ir.Model:
    """The graph of the checkpoint in `directory`, read from `plain`, which has the same files."""
    try:
        import mobius
    except ImportError as error:
        raise ExportError(f"exporting needs more packages ({error}): pip install 'via-sd-export[export]'") from None
    _check_weights(directory)
    try:
        # mobius draws progress bars of its own.
        with contextlib.redirect_stderr(io.StringIO()):
            package = mobius.build(str(plain), dtype="f32", execution_provider="cpu")
    except Exception as error:
        raise UnsupportedModelError(f"mobius-onnx cannot build {directory}: {type(error).__name__}: {error}") from error
    if "model" not in package:
        raise UnsupportedModelError(f"{directory} is not a causal language model (its parts: {', '.join(package)})")
    model: ir.Model = package["model"]
    missing = [name for name, value in model.graph.initializers.items() if value.const_value is None]
    if missing:
        raise ExportError(f"{directory} lacks weights for {missing[:3]} ({len(missing)} in all)")
    return model


def _check_weights(directory: Path) -> None:
    """Read every safetensors header: a truncated file is named here, where it can be understood."""
    from safetensors import SafetensorError, safe_open

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ExportError(f"{directory} has no *.safetensors file; convert the checkpoint to safetensors first")
    for file in files:
        try:
            with safe_open(file, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise ExportError(f"{file} is damaged ({error}); fetch it again") from None


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
