"""One weights file for many graphs: every large initializer is written once and every graph refers to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.external_data import CallbackInfo, convert_tensors_to_external

from via_sd.errors import ExportError
from via_sd.export.passes.quantize import SHARES_BYTES_OF
from via_sd.files import check_space
from via_sd.progress import Progress, no_progress

WEIGHTS_FILE = "weights.data"
#: Initializers up to this many bytes stay inside the graph file (shapes, axes, flags).
INLINE_BYTES = 1024
#: Page-aligned, so that a runtime can map each tensor where it lies.
ALIGNMENT = 4096


def load_graph(file: Path) -> ir.Model:
    """The graph of a bundle, its weights read when they are asked for.

    Raises:
        ExportError: weights behind a link, which onnx-ir does not read.
    """
    model = ir.load(file)
    for place in {file.parent / tensor.location for tensor in _external(model)}:
        if place.is_symlink() or place.stat().st_nlink > 1:
            raise ExportError(
                f"{place} is a link, or another name links to the same file, and weights are read from plain files "
                "only; copy the bundle (cp -rL) and give the copy"
            )
    return model


def _external(model: ir.Model) -> list[ir.ExternalTensor]:
    tensors = (value.const_value for value in initializers(model))
    return [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]


def write_weights(model: ir.Model, directory: Path, progress: Progress = no_progress) -> dict[str, ir.ExternalTensor]:
    """Write the large initializers of `model` to `directory`/weights.data, in the graph's order.

    Returns:
        What graphs refer to, by initializer name; initializers that share bytes share a place in the file.

    Raises:
        DiskSpaceError: they do not fit on the disk.
    """
    owners: list[ir.Value] = []
    sharers: list[ir.Value] = []
    large = _large(initializers(model))
    names = {value.name for value in large}
    for value in large:
        (sharers if value.metadata_props.get(SHARES_BYTES_OF) in names else owners).append(value)

    check_space(directory, _written_bytes(owners), WEIGHTS_FILE)

    def callback(_: ir.TensorProtocol, info: CallbackInfo) -> None:
        progress("writing weights", (info.index + 1) / info.total)

    written = convert_tensors_to_external(
        [_named(value) for value in owners], directory, WEIGHTS_FILE, callback=callback, alignment=ALIGNMENT
    )
    table = {value.name or "": tensor for value, tensor in zip(owners, written, strict=True)}
    for value in sharers:
        owner = table[value.metadata_props[SHARES_BYTES_OF]]
        assert value.const_value is not None
        assert value.const_value.nbytes == owner.nbytes
        table[value.name or ""] = _placed(value, directory, owner.offset, owner.length)
    return table


def _placed(value: ir.Value, directory: Path, offset: int | None, length: int | None) -> ir.ExternalTensor:
    """The constant of `value` as what lies at a place of the weights file."""
    tensor = value.const_value
    assert tensor is not None
    shape = ir.Shape(tensor.shape.numpy())
    return ir.ExternalTensor(
        WEIGHTS_FILE, offset, length, tensor.dtype, shape=shape, name=value.name or "", base_dir=directory
    )


def append_weights(model: ir.Model, directory: Path, weights: dict[str, ir.ExternalTensor]) -> None:
    """Write large initializers of `model` that are not in `weights` behind them, and add them to `weights`."""
    added = [value for value in _large(initializers(model)) if value.name not in weights]
    check_space(directory, _written_bytes(added), f"what is added to {WEIGHTS_FILE}")
    with (directory / WEIGHTS_FILE).open("ab") as stream:
        for value in added:
            name = value.name or ""
            assert value.const_value is not None
            offset = -(-stream.tell() // ALIGNMENT) * ALIGNMENT
            stream.write(bytes(offset - stream.tell()))
            data = value.const_value.tobytes()
            stream.write(data)
            weights[name] = _placed(value, directory, offset, len(data))


def save_graph(model: ir.Model, path: Path, weights: dict[str, ir.ExternalTensor]) -> None:
    """Save `model` beside the weights file; its large initializers must all be in `weights`."""
    for value in initializers(model):
        tensor = weights.get(value.name or "")
        if tensor is not None:
            value.const_value = tensor
    stray = [v.name for v in _large(initializers(model)) if v.name not in weights]
    if stray:
        raise ValueError(f"initializers that are not in {WEIGHTS_FILE}: {stray[:5]}")
    ir.save(model, path)


def added_bytes(models: Sequence[ir.Model], weights: Mapping[str, ir.ExternalTensor]) -> list[int]:
    """Bytes of the weights file that each of `models` refers to and none before it does."""
    seen: set[tuple[int | None, int | None]] = set()
    added = []
    for model in models:
        names = [value.name or "" for value in initializers(model)]
        places = {(weights[name].offset, weights[name].length) for name in names if name in weights}
        added.append(sum(length or 0 for _, length in places - seen))
        seen |= places
    return added


def weights_as_inputs(model: ir.Model) -> tuple[bytes, dict[str, np.ndarray]]:
    """Take the large initializers of `model`, in place, out of the graph: they become inputs.

    Returns:
        The serialised graph, and what to feed to these inputs, by name. Tensors that are mapped from a file stay
        mapped; those that a pass computes are computed here.
    """
    weights: dict[str, np.ndarray] = {}
    for value in _large(initializers(model)):
        tensor = value.const_value
        assert tensor is not None
        weights[value.name or ""] = np.ascontiguousarray(tensor.numpy())
        turn_into_input(model.graph, value)
    return bytes(ir.to_proto(model).SerializeToString()), weights


def turn_into_input(graph: ir.Graph, value: ir.Value) -> None:
    """Make an initializer of `graph` an input of the same name, type and shape."""
    assert value.const_value is not None
    value.type = ir.TensorType(value.const_value.dtype)
    value.shape = ir.Shape(value.const_value.shape.numpy())
    del graph.initializers[value.name or ""]
    value.const_value = None
    graph.inputs.append(value)


def initializers(model: ir.Model) -> Iterator[ir.Value]:
    """The initializers of a graph and of the branches of its `If`s."""
    for graph in (model.graph, *model.graph.subgraphs()):
        yield from graph.initializers.values()


def _large(values: Iterable[ir.Value]) -> list[ir.Value]:
    return [v for v in values if v.const_value is not None and v.const_value.nbytes > INLINE_BYTES]


def _written_bytes(values: Iterable[ir.Value]) -> int:
    """Bytes that initializers take in a weights file."""
    return sum(-(-v.const_value.nbytes // ALIGNMENT) * ALIGNMENT for v in values if v.const_value is not None)


def _named(value: ir.Value) -> ir.TensorProtocol:
    tensor = value.const_value
    assert tensor is not None
    tensor.name = value.name
    return tensor
