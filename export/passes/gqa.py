"""ONNX Runtime's `GroupQueryAttention`, as decoders use it: where its inputs and outputs are."""

from __future__ import annotations

from enum import IntEnum

import onnx_ir as ir

OP_TYPE = "GroupQueryAttention"


class Input(IntEnum):
    """Index of an input; without KEY and VALUE, QUERY is all three packed."""

    QUERY = 0
    KEY = 1
    VALUE = 2
    PAST_KEY = 3
    PAST_VALUE = 4
    LAST_POSITION = 5
    TOTAL_LENGTH = 6
    COS = 7
    SIN = 8
    POSITION_IDS = 9
    ATTENTION_BIAS = 10
    HEAD_SINK = 11
    K_SCALE = 12
    V_SCALE = 13
    Q_NORM_WEIGHT = 14
    K_NORM_WEIGHT = 15
    QUERY_LENGTHS = 16


class Output(IntEnum):
    """Index of an output."""

    ATTENTION = 0
    PRESENT_KEY = 1
    PRESENT_VALUE = 2


#: Input and output of each KV buffer: key, value.
KV = ((Input.PAST_KEY, Output.PRESENT_KEY), (Input.PAST_VALUE, Output.PRESENT_VALUE))


def attentions(graph: ir.Graph) -> list[ir.Node]:
    """The attention nodes of `graph`, in order of execution."""
    return [node for node in graph if node.op_type == OP_TYPE]


def given(node: ir.Node, index: Input) -> ir.Value | None:
    """The input of `node` at `index`, None where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def kv_buffers(node: ir.Node) -> list[tuple[ir.Value | None, ir.Value]]:
    """Past and present of the key and of the value."""
    return [(given(node, past), node.outputs[present]) for past, present in KV]


def number(node: ir.Node, name: str, default: float) -> float:
    """A numeric attribute of `node`, `default` where it is left out."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value
