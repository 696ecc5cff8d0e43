"""Small integer constants that several lowering steps add to a graph, each stored once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir


def int64_constant(graph: ir.Graph, values: Sequence[int] | int) -> ir.Value:
    """The initializer of `graph` that holds `values` as int64 (a scalar for a number)."""
    array = np.array(values, np.int64)
    name = "int64_" + ("scalar_" if array.ndim == 0 else "") + "_".join(str(v) for v in array.reshape(-1))
    return named_constant(graph, name, array)


def named_constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """The initializer `name` of `graph`, made from `array` if it is not there."""
    if name not in graph.initializers:
        value = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            shape=ir.Shape(array.shape),
            const_value=ir.tensor(array, name=name),
        )
        graph.register_initializer(value)
    return graph.initializers[name]


def add(
    nodes: list[ir.Node], op_type: str, inputs: Sequence[ir.Value | None], name: str, **attributes: object
) -> ir.Value:
    """Append a node with one output, both called `name`, to `nodes` and return that output."""
    node = ir.node(op_type, inputs, attributes, name=name)  # type: ignore[arg-type]
    node.outputs[0].name = name
    nodes.append(node)
    return node.outputs[0]
