"""One weights file per target, in the target's element type and layout: what is on disk is what is on the device.

Every tensor begins a page, so that a runtime maps the file once, copies it to the device once, and binds each tensor
where it lies (TensorRT asks that the address of an input is a multiple of 256).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import xxhash
from onnx_ir.external_data import CallbackInfo, convert_tensors_to_external

from via_sd.export.writer.weights import ALIGNMENT, INLINE_BYTES, WEIGHTS_FILE, turn_into_input
from via_sd.files import check_space
from via_sd.progress import Progress, no_progress

#: Model -> initializer -> where it lies in the file.
Table = dict[str, dict[str, ir.ExternalTensor]]


def shared_weights(model: ir.Model) -> list[ir.Value]:
    """The initializers that live in the weights file: floating-point tensors beyond `INLINE_BYTES`."""
    return [
        value
        for value in model.graph.initializers.values()
        if value.const_value is not None
        and value.const_value.nbytes > INLINE_BYTES
        and value.const_value.dtype.is_floating_point()
    ]


def write_shared_weights(models: Mapping[str, ir.Model], directory: Path, progress: Progress = no_progress) -> Table:
    """Write the shared weights of `models` (name -> portable graph) to `directory`/weights.data, model by model.

    What several initializers have in common, in one model or between two, is written once.

    Raises:
        DiskSpaceError: they do not fit on the disk.
    """
    owners = [(name, value) for name, model in models.items() for value in shared_weights(model)]
    distinct: dict[bytes, ir.TensorProtocol] = {}
    keys = []
    for _, value in owners:
        tensor = value.const_value
        assert tensor is not None
        keys.append(_content(tensor))
        distinct.setdefault(keys[-1], tensor)

    check_space(directory, sum(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in distinct.values()), WEIGHTS_FILE)

    def callback(_: ir.TensorProtocol, info: CallbackInfo) -> None:
        progress("writing weights", (info.index + 1) / info.total)

    written = convert_tensors_to_external(
        list(distinct.values()), directory, WEIGHTS_FILE, callback=callback, alignment=ALIGNMENT, align_threshold=0
    )
    places = dict(zip(distinct, written, strict=True))
    table: Table = {name: {} for name in models}
    for (name, value), key in zip(owners, keys, strict=True):
        place = places[key]
        table[name][value.name or ""] = ir.ExternalTensor(
            place.location,
            place.offset,
            place.length,
            place.dtype,
            shape=place.shape,
            name=value.name or "",
            base_dir=place.base_dir,
        )
    return table


def _content(tensor: ir.TensorProtocol) -> bytes:
    """Digest of everything a tensor says."""
    digest = xxhash.xxh3_128(f"{tensor.dtype.name} {tensor.shape}".encode())
    digest.update(tensor.tobytes())
    return digest.digest()


def refer_to_weights(model: ir.Model, table: Mapping[str, ir.ExternalTensor]) -> None:
    """Make the shared weights of `model` refer to the file; each must be in `table`."""
    for value in shared_weights(model):
        value.const_value = table[value.name or ""]


def weights_as_inputs(model: ir.Model) -> bytes:
    """`model`, serialised with its shared weights as inputs instead of initializers."""
    copy = model.clone()
    for value in shared_weights(copy):
        turn_into_input(copy.graph, value)
    return bytes(ir.to_proto(copy).SerializeToString(deterministic=True))


def table_to_json(table: Table) -> dict[str, list[dict[str, Any]]]:
    """The manifest's list of tensors of each model, each where it lies in the file."""
    return {
        name: [
            {
                "name": tensor.name,
                "offset": tensor.offset or 0,
                "size": tensor.length,
                "dtype": tensor.dtype.numpy().name,
                "shape": list(tensor.shape.numpy()),
            }
            for tensor in tensors.values()
        ]
        for name, tensors in table.items()
    }
