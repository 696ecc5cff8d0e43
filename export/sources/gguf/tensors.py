"""The tensors of a GGUF file under their names in transformers, dequantised one by one when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.export.failures import one_message
from via_sd.export.sources.accounting import refuse_missing, refuse_surplus
from via_sd.export.sources.gguf.families import Family
from via_sd.export.sources.gguf.file import GgufFile
from via_sd.export.sources.weight_files import check_finite

if TYPE_CHECKING:
    import torch

#: Divisors of the rotary frequencies, which the configuration has; one of each layer that has none.
_ROPE_FACTORS = "rope_freqs.weight"
#: Tensors with one row for each rotary pair, which llama.cpp turns (interleaved) in some families.
_PERMUTED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


class GgufTensors(Mapping[str, "torch.Tensor"]):
    """Every tensor of the model by its name in transformers, float32 (float16 where it is stored so), finite.

    Raises (by construction):
        ExportError: tensors that the model has and the file has not, or of another shape, or the other way round.
    """

    def __init__(self, file: GgufFile, family: Family, config: Any) -> None:
        self.file, self.family, self.config = file, family, config
        shapes = model_shapes(file, config)
        self.places = _places(file, config.num_hidden_layers, shapes)
        refuse_missing(file.path, (place for place in self.places.values() if place not in file.tensors))
        refuse_surplus(file.path, file.tensors.keys() - set(self.places.values()) - {_ROPE_FACTORS}, file.architecture)
        for name, place in self.places.items():
            found = file.tensors[place].shape
            if found != shapes[name]:
                raise ExportError(
                    f"{file.path} has {place} of shape {list(found)}, and its keys ask for {list(shapes[name])}"
                )

    def __getitem__(self, name: str) -> torch.Tensor:
        import torch

        place = self.places[name]
        stored = self.file.tensors[place]
        values = stored.values()
        kind = place.split(".")[-2]
        if self.family.permuted and kind in _PERMUTED:
            values = _unpermute(values, getattr(self.config, _PERMUTED[kind]))
        if self.family.norm_offset and kind.endswith("norm"):
            values = values - np.float32(self.family.norm_offset)
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        check_finite(tensor, place, stored.file)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def model_shapes(file: GgufFile, config: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model that `config` describes, tied ones once."""
    import torch
    from transformers import AutoModelForCausalLM

    models: Any = AutoModelForCausalLM
    with (
        one_message(f"transformers cannot build the model of {file.path}", UnsupportedModelError),
        torch.device("meta"),
    ):
        model = models.from_config(config)
        return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _places(file: GgufFile, layers: int, names: Mapping[str, object]) -> dict[str, str]:
    """Name in transformers -> name in the file, by the table of the `gguf` package."""
    import gguf

    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture)
    table = gguf.get_tensor_name_map(architecture, layers)
    places = {}
    for name in names:
        stem, _, suffix = name.rpartition(".")
        place = table.get_name(stem)
        if place is None:
            raise UnsupportedModelError(f"{file.path} is {file.architecture}, which has no tensor for {name}")
        places[name] = f"{place}.{suffix}"
    return places


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from interleaved pairs (0, 1), (2, 3) ... to pairs half a head apart."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    result: np.ndarray = pairs.swapaxes(1, 2).reshape(rows.shape)
    return result
