"""Inputs and outputs of a graph, found and made as the contract has them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from via_sd.contract.graphs import GraphTensor


def find_input(graph: ir.Graph, name: str) -> ir.Value | None:
    """The input `name`, None if there is none."""
    return next((value for value in graph.inputs if value.name == name), None)


def find_output(graph: ir.Graph, name: str) -> ir.Value | None:
    """The output `name`, None if there is none."""
    return next((value for value in graph.outputs if value.name == name), None)


def new_value(tensor: GraphTensor, **sizes: int) -> ir.Value:
    """A value with name, element type and shape of `tensor`; `sizes` are dimensions that are known."""
    dtype = ir.DataType.from_numpy(np.dtype(tensor.dtype))
    return ir.Value(name=tensor.name, type=ir.TensorType(dtype), shape=shape_of(tensor, **sizes))


def shape_of(tensor: GraphTensor, **sizes: int | None) -> ir.Shape:
    """The shape of `tensor`; `sizes` are dimensions that are known, or None."""
    return ir.Shape([dim if (size := sizes.get(str(dim))) is None else size for dim in tensor.shape])
