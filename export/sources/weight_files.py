"""The safetensors files of a checkpoint: which they are, what they hold, their tensors, checked as they are read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.export.failures import describe
from via_sd.files import read_json_object

if TYPE_CHECKING:
    import torch

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")
#: The same weights in the format of a model's authors, beside those in the format of transformers.
_OTHER_COPIES = ("consolidated",)
#: Types of weights that are numbers as they stand: the others need scales that lie in other tensors.
_PLAIN_TYPES = ("F64", "F32", "F16", "BF16")
_SCALED_TYPES = {
    "F8_E4M3": "float8 (fp8)",
    "F8_E5M2": "float8 (fp8)",
    "F8_E4M3FNUZ": "float8 (fp8)",
    "F8_E5M2FNUZ": "float8 (fp8)",
    "F8_E8M0": "float8 scales (MXFP)",
    "F4": "float4",
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, and what it is as the file's header says.

    Attributes:
        dtype: as safetensors names it (`F32`, `BF16`, ...).
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]


class WeightFiles(Mapping[str, "torch.Tensor"]):
    """The tensors of a checkpoint's directory by name; reading one checks that it has no NaN and no Inf.

    Attributes:
        stored: what the headers say, by tensor name.
        unread: safetensors files in the directory that are not part of the checkpoint.

    Raises (by construction):
        ExportError: no weights, a file of them that is missing or damaged, an index that does not fit its files.
        UnsupportedModelError: weights of a type that says nothing without scales.
    """

    def __init__(self, directory: Path) -> None:
        present = {path.name for path in directory.glob("*.safetensors")}
        wanted = _listed(directory, present)
        self.unread = sorted(name for name in present - wanted.keys() if not name.startswith(_OTHER_COPIES))
        self.stored: dict[str, StoredTensor] = {}
        for name, tensors in sorted(wanted.items()):
            found = _header(directory / name)
            if tensors is not None and tensors != found.keys():
                other = sorted(tensors ^ found.keys())[0]
                raise ExportError(
                    f"{directory / _INDEX} and {name} disagree on {len(tensors ^ found.keys())} tensors ({other}); "
                    "fetch the checkpoint again"
                )
            twice = sorted(self.stored.keys() & found.keys())
            if twice:
                raise ExportError(f"{directory} has {twice[0]} in two files; wanted every tensor once")
            self.stored |= found
        _check_types(self.stored)

    def __getitem__(self, name: str) -> torch.Tensor:
        import torch
        from safetensors import safe_open

        place = self.stored[name]
        try:
            with safe_open(place.file, framework="pt") as stream:
                tensor: torch.Tensor = stream.get_tensor(name)
        except Exception as error:  # noqa: BLE001 - the library's own error, a RuntimeError, an OSError
            raise ExportError(f"{place.file} is damaged at {name} ({describe(error)}); fetch it again") from None
        check_finite(tensor, name, place.file)
        return tensor if tensor.dtype != torch.float64 else tensor.float()

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def check_finite(tensor: torch.Tensor, name: str, file: Path) -> None:
    """Refuse a tensor with NaN or Inf: whatever runs through it is lost.

    Raises:
        ExportError: names the tensor and the first such entry.
    """
    import torch

    # A sum is finite only where every entry is; where it is not, every entry is looked at (a sum may overflow too).
    if torch.isfinite(tensor.sum(dtype=torch.float64)):
        return
    wrong = (~torch.isfinite(tensor)).nonzero()
    if len(wrong):
        raise ExportError(
            f"{file} has {len(wrong)} entries that are NaN or Inf in {name} (the first at {wrong[0].tolist()}): the "
            "weights are damaged; fetch or make the checkpoint again"
        )


def _listed(directory: Path, present: set[str]) -> dict[str, set[str] | None]:
    """Weight file -> the tensors that the index places in it (None where there is no index)."""
    index = directory / _INDEX
    if index.is_file():
        described = read_json_object(index, ExportError)
        if not isinstance(described.get("metadata"), dict):  # transformers reads none without
            raise ExportError(f"{index} has no metadata object; fetch it again")
        places = described.get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise ExportError(f"{index} has no weight_map of names; fetch it again")
        listed: dict[str, set[str] | None] = {}
        for tensor, name in places.items():
            path = PurePosixPath(name.replace("\\", "/"))
            if len(path.parts) != 1 or path.name in (".", ".."):
                raise ExportError(f"{index} places {tensor} in {name!r}; wanted the name of a file beside it")
            tensors = listed.setdefault(name, set())
            assert tensors is not None
            tensors.add(tensor)
        missing = sorted(name for name in listed if not (directory / name).is_file())
        if missing:
            raise ExportError(
                f"{directory} lacks {', '.join(missing[:3])} ({len(missing)} of {len(listed)} weight files that its "
                "index lists); fetch them"
            )
        if _SINGLE in present and _SINGLE not in listed:
            raise ExportError(
                f"{directory} has {_SINGLE} and an index of other files; wanted one of them: move the other away"
            )
        return listed
    if _SINGLE in present and (directory / _SINGLE).is_file():
        return {_SINGLE: None}
    shards = sorted(name for name in present if _SHARD.fullmatch(name))
    if shards:
        raise ExportError(f"{directory} has {shards[0]} and no {_INDEX}, which says what belongs together; fetch it")
    if present:
        raise ExportError(f"{directory} has {', '.join(sorted(present)[:3])}; wanted {_SINGLE}, or files with an index")
    raise ExportError(f"{directory} has no *.safetensors file; convert the checkpoint to safetensors first")


def _header(file: Path) -> dict[str, StoredTensor]:
    from safetensors import safe_open

    try:
        with safe_open(file, framework="np") as stream:
            slices = {name: stream.get_slice(name) for name in stream.keys()}  # noqa: SIM118 - no mapping
            return {
                name: StoredTensor(file, str(tensor.get_dtype()), tuple(tensor.get_shape()))
                for name, tensor in slices.items()
            }
    except Exception as error:  # noqa: BLE001 - the library's own error, a ValueError, an OSError
        raise ExportError(f"{file} is damaged ({describe(error)}); fetch it again") from None


def _check_types(stored: Mapping[str, StoredTensor]) -> None:
    for name, tensor in stored.items():
        if tensor.dtype not in _PLAIN_TYPES and not is_buffer(name):
            kind = _SCALED_TYPES.get(tensor.dtype, "integers")
            raise UnsupportedModelError(
                f"{tensor.file} holds {name} as {tensor.dtype}: {kind} whose scales lie elsewhere; wanted weights in "
                "float32, float16 or bfloat16: give the checkpoint that was quantised"
            )


def is_buffer(name: str) -> bool:
    """Whether a tensor holds what a model computes anew (rotary frequencies, causal masks), as old checkpoints do."""
    return name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".position_ids"))
