"""Mask files: what a tier does with each sublayer of a model, as JSON.

Our own format says everything by name. The shapes other tools write are read too; one that does not say whether its
numbers mean *keep* or *skip* is refused until the caller says so, because guessing wrong inverts the mask silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from via_sd.errors import MaskError
from via_sd.files import read_json, write_whole
from via_sd.masks.mask import FORMAT, HEAD_STATES, SUBLAYER_STATES, VERSION, Mask, ModelIdentity, brief

#: The version before states, with flags that say keep or skip; it is read and not written.
_FLAGS_VERSION = 1
_OURS = ("attention", "mlp", "keep_attention", "keep_mlp")
MaskFormat = Literal["keep", "skip"]

_STATES: dict[str, Any] = {"type": "array", "items": {"enum": list(SUBLAYER_STATES)}, "minItems": 1}
_FLAGS: dict[str, Any] = {"type": "array", "items": {"type": "boolean"}, "minItems": 1}
_ORIGIN: dict[str, Any] = {
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
}
#: JSON Schema of the mask file, for editors and other tools. `read_mask` checks the same and explains what is wrong.
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": FORMAT,
    "anyOf": [
        {
            "type": "object",
            "required": ["attention", "mlp"],
            "properties": {
                "format": {"const": FORMAT},
                "version": {"const": VERSION},
                "attention": _STATES,
                "mlp": _STATES,
                "head": {"enum": list(HEAD_STATES)},
                **_ORIGIN,
            },
        },
        {
            "type": "object",
            "required": ["keep_attention", "keep_mlp"],
            "properties": {
                "format": {"const": FORMAT},
                "version": {"const": _FLAGS_VERSION},
                "keep_attention": _FLAGS,
                "keep_mlp": _FLAGS,
                **_ORIGIN,
            },
        },
    ],
}


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
        data = read_json(source)
    except OSError as error:
        raise MaskError(f"cannot read mask {source}: {error.strerror or error}") from None
    except ValueError as error:
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
    if data.get("format") == FORMAT or any(key in data for key in _OURS):
        return _from_ours(data)
    for key, keep in (("keep_layers", True), ("skip_layers", False), ("keep_mask", True)):
        if key in data:
            if not isinstance(data[key], list):
                raise MaskError(f'"{key}" holds {type(data[key]).__name__}, wanted an array')
            return _from_array(data[key], keep=keep, num_layers=num_layers, vector=key == "keep_mask")
    raise MaskError(
        f"no mask found in keys {sorted(map(str, data))}; "
        "wanted attention and mlp, keep_attention and keep_mlp, or keep_layers, skip_layers or keep_mask"
    )


def _from_ours(data: Mapping[str, Any]) -> Mask:
    if data.get("format", FORMAT) != FORMAT:
        raise MaskError(f'format is {data["format"]!r}, wanted "{FORMAT}"')
    version = data.get("version", _FLAGS_VERSION if "keep_attention" in data or "keep_mlp" in data else VERSION)
    if version not in (_FLAGS_VERSION, VERSION) or version is True:
        raise MaskError(
            f"version is {version!r}, this release reads versions {_FLAGS_VERSION} and {VERSION}; "
            "use the release that wrote it"
        )
    model, search = data.get("model"), data.get("search", {})
    if model is not None and not isinstance(model, dict):
        raise MaskError(f'"model" must be an object, found {brief(model)}')
    if not isinstance(search, dict):
        raise MaskError(f'"search" must be an object, found {brief(search)}')
    origin: dict[str, Any] = {"model": ModelIdentity.from_json(model) if model is not None else None, "search": search}
    if version == _FLAGS_VERSION:
        wanted = "an array of true and false, one per layer"
        flags = [_array(data, key, bool, wanted) for key in ("keep_attention", "keep_mlp")]
        return Mask.from_flags(*flags, **origin)
    wanted = f"an array of {', '.join(SUBLAYER_STATES)}, one per layer"
    attention, mlp = (tuple(_array(data, key, str, wanted)) for key in ("attention", "mlp"))
    return Mask(attention, mlp, data.get("head", "keep"), **origin)


def _array(data: Mapping[str, Any], key: str, kind: type, wanted: str) -> list[Any]:
    value = data.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(v, kind) for v in value):
        raise MaskError(f'"{key}" must be {wanted}; found {brief(value)}')
    return value


def _from_array(values: list[Any], *, keep: bool, num_layers: int | None, vector: bool = False) -> Mask:
    """Flags (booleans, or 0/1 with one entry per layer) or layer indices."""
    is_flags = all(isinstance(v, bool) for v in values) and bool(values)
    is_bits = all(isinstance(v, int) and v in (0, 1) for v in values) and (vector or len(values) == num_layers)
    if vector and not (is_flags or is_bits):
        raise MaskError(f"a keep mask holds true/false or 1/0 per layer; found {brief(values)}")
    if is_flags or is_bits:
        return Mask.from_layers([bool(v) == keep for v in values])
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise MaskError(f"layers are listed by index; found {brief(values)}")
    if num_layers is None:
        raise MaskError("a list of layer indices does not say how many layers the model has; read it with the model")
    wrong = sorted({v for v in values if not 0 <= v < num_layers})
    if wrong:
        raise MaskError(f"layers {wrong} do not exist: the model has layers 0 to {num_layers - 1}")
    listed = set(values)
    return Mask.from_layers([(layer in listed) == keep for layer in range(num_layers)])
