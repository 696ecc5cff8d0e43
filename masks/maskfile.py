"""Mask files: which sublayers of a model a slim-verifier keeps (the paper's z, section 2.2).

Our own format says everything by name. The shapes other tools write are read too; one that does not say whether its
numbers mean *keep* or *skip* is refused until the caller says so, because guessing wrong inverts the mask silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from via_sd.errors import MaskError
from via_sd.files import write_whole

FORMAT = "via-sd-mask"
VERSION = 1
MaskFormat = Literal["keep", "skip"]

#: JSON Schema of the mask file, for editors and other tools. `read_mask` checks the same and explains what is wrong.
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": FORMAT,
    "type": "object",
    "required": ["keep_attention", "keep_mlp"],
    "properties": {
        "format": {"const": FORMAT},
        "version": {"const": VERSION},
        "keep_attention": {"type": "array", "items": {"type": "boolean"}, "minItems": 1},
        "keep_mlp": {"type": "array", "items": {"type": "boolean"}, "minItems": 1},
        "model": {
            "type": ["object", "null"],
            "required": ["model_type", "num_layers", "hidden_size", "vocab_size", "fingerprint"],
            "properties": {
                "model_type": {"type": "string"},
                "num_layers": {"type": "integer", "minimum": 1},
                "hidden_size": {"type": "integer", "minimum": 1},
                "vocab_size": {"type": "integer", "minimum": 1},
                "fingerprint": {"type": "string"},
            },
        },
        "search": {"type": "object"},
    },
}


@dataclass(frozen=True)
class ModelIdentity:
    """What makes a mask belong to a model.

    `fingerprint` is a hash over the model's normalisation weights, which training changes and quantisation does not:
    a mask stays valid for another precision of the same checkpoint and is refused for another checkpoint of the same
    shape.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    fingerprint: str

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelIdentity:
        """Read the `model` object of a mask file or a bundle manifest; raises `MaskError` if a field is wrong."""
        for key, example in asdict(_EXAMPLE).items():
            value = data.get(key)
            if type(value) is not type(example) or (isinstance(value, int) and value < 1):
                wanted = "a text" if isinstance(example, str) else "a whole number, 1 or more"
                raise MaskError(f"the model identity's {key} is {_brief(value)}, wanted {wanted}")
        return cls(**{key: data[key] for key in asdict(_EXAMPLE)})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_EXAMPLE = ModelIdentity("llama", 1, 1, 1, "")


@dataclass(frozen=True)
class Mask:
    """A mask z: per layer, per sublayer, keep (`True`) or skip (`False`).

    Attributes:
        keep_attention: one flag per layer for its attention sublayer.
        keep_mlp: one flag per layer for its MLP sublayer.
        name: what tiers and files made from it are called.
        model: the model it was made for, `None` if the file did not say.
        search: how it was found (seed, cost, calibration text, …), free-form.
    """

    keep_attention: tuple[bool, ...]
    keep_mlp: tuple[bool, ...]
    name: str = "slim"
    model: ModelIdentity | None = None
    search: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if len(self.keep_attention) != len(self.keep_mlp):
            raise MaskError(
                f"the mask has {len(self.keep_attention)} attention flags and {len(self.keep_mlp)} MLP flags; "
                "it wants one of each per layer"
            )
        if not any(self.keep_attention) and not any(self.keep_mlp):
            raise MaskError("the mask keeps nothing: a slim-verifier needs at least one sublayer")

    @classmethod
    def from_layers(cls, keep: Sequence[bool], **fields: Any) -> Mask:
        """A mask of whole layers: attention and MLP kept or skipped together."""
        flags = tuple(bool(k) for k in keep)
        return cls(flags, flags, **fields)

    @property
    def num_layers(self) -> int:
        return len(self.keep_attention)

    @property
    def keeps_all(self) -> bool:
        return all(self.keep_attention) and all(self.keep_mlp)

    @property
    def sublayers(self) -> tuple[bool, ...]:
        """Flags in the order of execution: attention 0, MLP 0, attention 1, …; length 2 * num_layers."""
        return tuple(flag for pair in zip(self.keep_attention, self.keep_mlp, strict=True) for flag in pair)

    @property
    def skip_ratio(self) -> float:
        """Share of the sublayers that is skipped, 0 to 1."""
        flags = self.sublayers
        return flags.count(False) / len(flags)

    def is_within(self, outer: Mask) -> bool:
        """Whether every attention sublayer kept here is kept by `outer` too.

        Tiers share KV buffers, so a lower tier may only read what the tier above it writes.
        """
        return all(o or not i for i, o in zip(self.keep_attention, outer.keep_attention, strict=True))

    def check_model(self, model: ModelIdentity) -> None:
        """Raise `MaskError` unless the mask has the model's length and, if it names a model, names this one."""
        if self.num_layers != model.num_layers:
            raise MaskError(
                f"mask '{self.name}' is for {self.num_layers} layers, the model ({model.model_type}) has "
                f"{model.num_layers}; use a mask made for this model"
            )
        if self.model is not None and self.model != model:
            differing = [k for k, v in self.model.to_json().items() if v != model.to_json()[k]]
            raise MaskError(
                f"mask '{self.name}' was made for another model: "
                + ", ".join(f"{k} is {self.model.to_json()[k]!r}, wanted {model.to_json()[k]!r}" for k in differing)
                + '; search a mask for this model, or delete the file\'s "model" entry to use it all the same'
            )

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "keep_attention": list(self.keep_attention),
            "keep_mlp": list(self.keep_mlp),
        }
        if self.model is not None:
            data["model"] = self.model.to_json()
        if self.search:
            data["search"] = dict(self.search)
        return data


def write_mask(mask: Mask, path: Path | str) -> None:
    """Write `mask` in our format; the file appears complete or not at all."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, json.dumps(mask.to_json(), indent=1) + "\n")


def read_mask(path: Path | str, *, num_layers: int | None = None, mask_format: MaskFormat | None = None) -> Mask:
    """Read a mask file, ours or one of the shapes found in the wild.

    Args:
        path: a JSON file. The mask is named after the file.
        num_layers: the model's layer count; a list of layer indices needs it.
        mask_format: what a bare array means: layers (or flags) to `keep`, or to `skip`.

    Raises:
        MaskError: not a file, not JSON, no known shape, an ambiguous bare array, or a mask that keeps nothing.
    """
    source = Path(path)
    try:
        data = json.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise MaskError(f"cannot read mask {source}: {error.strerror or error}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise MaskError(f"mask {source} is not JSON: {error}") from None
    try:
        mask = parse_mask(data, num_layers=num_layers, mask_format=mask_format)
    except MaskError as error:
        raise MaskError(f"mask {source}: {error}") from None
    return replace(mask, name=source.stem)


def parse_mask(data: Any, *, num_layers: int | None = None, mask_format: MaskFormat | None = None) -> Mask:
    """The mask that decoded JSON `data` describes; see `read_mask`."""
    if isinstance(data, list):
        if mask_format is None:
            raise MaskError(
                "a bare array does not say whether it lists what to keep or what to skip; "
                "say so with --mask-format keep|skip"
            )
        return _from_array(data, keep=mask_format == "keep", num_layers=num_layers)
    if not isinstance(data, dict):
        raise MaskError(f"found {type(data).__name__}, wanted an object or an array")
    if "keep_attention" in data or "keep_mlp" in data or data.get("format") == FORMAT:
        return _from_ours(data)
    for key, keep in (("keep_layers", True), ("skip_layers", False), ("keep_mask", True)):
        if key in data:
            if not isinstance(data[key], list):
                raise MaskError(f'"{key}" holds {type(data[key]).__name__}, wanted an array')
            return _from_array(data[key], keep=keep, num_layers=num_layers, vector=key == "keep_mask")
    raise MaskError(
        f"no mask found in keys {sorted(map(str, data))}; "
        "wanted keep_attention and keep_mlp, or keep_layers, skip_layers or keep_mask"
    )


def _from_ours(data: Mapping[str, Any]) -> Mask:
    if data.get("format", FORMAT) != FORMAT:
        raise MaskError(f'format is {data["format"]!r}, wanted "{FORMAT}"')
    if data.get("version", VERSION) != VERSION or data.get("version") is True:
        raise MaskError(
            f"version is {data['version']!r}, this release reads version {VERSION}; use the release that wrote it"
        )
    flags = {}
    for key in ("keep_attention", "keep_mlp"):
        value = data.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(v, bool) for v in value):
            raise MaskError(f'"{key}" must be an array of true and false, one per layer; found {_brief(value)}')
        flags[key] = tuple(value)
    model = data.get("model")
    if model is not None and not isinstance(model, dict):
        raise MaskError(f'"model" must be an object, found {_brief(model)}')
    search = data.get("search", {})
    if not isinstance(search, dict):
        raise MaskError(f'"search" must be an object, found {_brief(search)}')
    return Mask(
        keep_attention=flags["keep_attention"],
        keep_mlp=flags["keep_mlp"],
        model=ModelIdentity.from_json(model) if model is not None else None,
        search=search,
    )


def _from_array(values: list[Any], *, keep: bool, num_layers: int | None, vector: bool = False) -> Mask:
    """Flags (booleans, or 0/1 with one entry per layer) or layer indices."""
    is_flags = all(isinstance(v, bool) for v in values) and bool(values)
    is_bits = all(isinstance(v, int) and v in (0, 1) for v in values) and (vector or len(values) == num_layers)
    if vector and not (is_flags or is_bits):
        raise MaskError(f"a keep mask holds true/false or 1/0 per layer; found {_brief(values)}")
    if is_flags or is_bits:
        return Mask.from_layers([bool(v) == keep for v in values])
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise MaskError(f"layers are listed by index; found {_brief(values)}")
    if num_layers is None:
        raise MaskError("a list of layer indices does not say how many layers the model has; read it with the model")
    wrong = sorted({v for v in values if not 0 <= v < num_layers})
    if wrong:
        raise MaskError(f"layers {wrong} do not exist: the model has layers 0 to {num_layers - 1}")
    listed = set(values)
    return Mask.from_layers([(layer in listed) == keep for layer in range(num_layers)])


def _brief(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
