"""GGUF files as Hugging Face directories: dequantised to float32 once, then everything else is one path."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.export.writer.reference import hidden_progress_bars


def gguf_to_directory(source: Path, target: Path) -> None:
    """Write the model and tokenizer in the GGUF file `source` as a Hugging Face directory `target` (float32).

    Raises:
        ExportError: not a GGUF file, or a truncated one.
        UnsupportedModelError: a quantisation or an architecture that transformers cannot read.
    """
    check_gguf(source)
    import torch
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    try:
        with _without_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(**where)
    except (ValueError, KeyError, NotImplementedError, OSError) as error:
        raise UnsupportedModelError(f"transformers cannot read {source}: {error}") from error
    target.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict()
    # Of the file it came from, not of the weights as they are now.
    config.pop("quantization_config", None)
    config.pop("_model_name_or_path", None)
    config["architectures"] = [type(model).__name__]
    (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    if model.generation_config is not None:
        model.generation_config.save_pretrained(target)
    save_model(model, str(target / "model.safetensors"), metadata={"format": "pt"})
    tokenizer.save_pretrained(target)


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing its own: one of them goes through a setting, the GGUF reader's does not."""
    from transformers import modeling_gguf_pytorch_utils as reader

    bar = reader.tqdm  # type: ignore[attr-defined]
    reader.tqdm = functools.partial(bar, disable=True)  # type: ignore[attr-defined]
    try:
        with hidden_progress_bars():
            yield
    finally:
        reader.tqdm = bar  # type: ignore[attr-defined]


def check_gguf(source: Path) -> None:
    """Read the header and every tensor's place: a wrong, cut or foreign file is named before the long work."""
    try:
        import gguf
    except ImportError as error:
        raise ExportError(f"reading GGUF needs more packages ({error}): pip install 'via-sd-export[export]'") from None
    with source.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise ExportError(f"{source} is no GGUF file (it starts with {magic!r}, wanted b'GGUF')")
    try:
        reader = gguf.GGUFReader(source)
    except ValueError as error:
        if "GGMLQuantizationType" in str(error):
            number = re.findall(r"\d+", str(error))[-1]
            raise UnsupportedModelError(
                f"{source} uses quantisation type {number}, which this gguf package does not know; "
                "try a newer one (pip install -U gguf), or the original checkpoint"
            ) from None
        raise ExportError(f"{source} is damaged or cut short: {error}; fetch it again") from None
    except (OSError, IndexError) as error:
        raise ExportError(f"{source} is damaged or cut short: {error}; fetch it again") from None
    plain = {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16}
    unknown = sorted(
        {
            t.tensor_type.name
            for t in reader.tensors
            if t.tensor_type not in plain and not _can_dequantise(t.tensor_type)
        }
    )
    if unknown:
        raise UnsupportedModelError(
            f"{source} is quantised as {', '.join(unknown)}, which cannot be dequantised; "
            "use a file in one of the Q*_0, Q*_1, Q*_K or IQ formats, or the original checkpoint"
        )


def _can_dequantise(kind: object) -> bool:
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    assert isinstance(kind, GGMLQuantizationType)
    _, size = GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
