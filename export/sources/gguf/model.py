"""A GGUF file as a checkpoint: configuration and tokenizer in a directory, tensors read from the file when needed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from via_sd.errors import ExportError
from via_sd.export.failures import one_message
from via_sd.export.sources.gguf.config import check_model, config_of, notes_of
from via_sd.export.sources.gguf.file import open_gguf
from via_sd.export.sources.gguf.rope import check_rope
from via_sd.export.sources.gguf.tensors import GgufTensors
from via_sd.export.sources.gguf.tokenizer import write_tokenizer
from via_sd.files import check_space


@dataclass(frozen=True)
class GgufModel:
    """A language model in a GGUF file.

    Attributes:
        config: configuration object of transformers.
        tensors: every weight by its name in transformers.
        notes: what of the file is not read.
    """

    config: Any
    tensors: GgufTensors
    notes: tuple[str, ...]


def open_gguf_model(source: Path, directory: Path) -> GgufModel:
    """Read `source`, and write its configuration and tokenizer, not its weights, to `directory`.

    Raises:
        ExportError: no GGUF file, a damaged one, or keys and tensors that do not fit each other.
        UnsupportedModelError: no language model, or one that asks for what is not read here.
    """
    try:
        import gguf  # noqa: F401 - named here rather than where it is first used
    except ImportError as error:
        raise ExportError(f"reading GGUF needs more packages ({error}): pip install 'via-sd-export[export]'") from None
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    file = open_gguf(source)
    family = check_model(file)
    described = config_of(file, family)
    with one_message(f"the keys of {source} make no configuration"):
        config = AutoConfig.for_model(**described, pad_token_id=None)  # a class has one of its own
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type]]
    check_rope(file, config)
    tensors = GgufTensors(file, family, config)
    directory.mkdir(parents=True, exist_ok=True)
    notes = notes_of(file) + write_tokenizer(file, directory)
    ends = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
    config.eos_token_id, config.bos_token_id, config.pad_token_id = ends["eos_token_id"], ends["bos_token_id"], None
    (directory / "config.json").write_text(json.dumps(config.to_dict(), indent=1), encoding="utf-8")
    return GgufModel(config, tensors, notes)


def gguf_to_directory(source: Path, target: Path) -> None:
    """Write the model in the GGUF file `source` as a Hugging Face directory `target`, its weights dequantised.

    Raises:
        ExportError, UnsupportedModelError: as `open_gguf_model`.
        DiskSpaceError: the weights do not fit on the disk.
    """
    from safetensors.torch import save_file

    model = open_gguf_model(source, target)
    tensors = dict(model.tensors)
    check_space(target, sum(tensor.nbytes for tensor in tensors.values()), "the weights in float32")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
