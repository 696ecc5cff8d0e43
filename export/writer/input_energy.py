"""What enters the matrix products of a decoder: the mean square of every input channel, for quantisation."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from via_sd.export.passes import constant_products
from via_sd.export.writer.check import run_steps
from via_sd.export.writer.stepper import Stepper
from via_sd.export.writer.weights import weights_as_inputs

_PREFIX = "energy."
#: Random tokens are enough: on SmolLM2 their energies bring nearly all of what those of real text bring.
_TOKENS = 256


def add_energy_outputs(model: ir.Model) -> None:
    """Give the lowered graph an output `energy.WEIGHT` [K] for every product with a constant weight [K, N], in place.

    The sum of squares over the step's tokens of each input channel; nothing else in the graph changes.
    """
    graph = model.graph
    axes = ir.Value(name="energy_axes", const_value=ir.tensor(np.array([0, 1]), name="energy_axes"))
    graph.register_initializer(axes)
    for node in constant_products(graph):
        inputs, weight = node.inputs[0], node.inputs[1]
        assert weight is not None
        square = ir.node("ReduceSumSquare", [inputs, axes], {"keepdims": 0})
        square.outputs[0].name = _PREFIX + (weight.name or "")
        square.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        graph.insert_after(node, square)
        graph.outputs.append(square.outputs[0])


def input_energy(graph: Stepper, vocab_size: int, max_seq_len: int) -> dict[str, np.ndarray]:
    """Mean square of each input channel, float32 [K], by weight name, over a text of random tokens.

    Args:
        graph: with the outputs of `add_energy_outputs`.
    """
    tokens = np.random.default_rng(1).integers(0, vocab_size, min(_TOKENS, max_seq_len))
    (outputs,) = run_steps(graph, tokens, [len(tokens)], max_seq_len)
    return {
        name.removeprefix(_PREFIX): value / len(tokens) for name, value in outputs.items() if name.startswith(_PREFIX)
    }


def measured_energy(model: ir.Model, vocab_size: int, max_seq_len: int) -> dict[str, np.ndarray]:
    """The input energies of the lowered graph `model` in float32, which is left as it is; see `input_energy`."""
    measured: ir.Model = model.clone()
    add_energy_outputs(measured)
    # The weights are fed, not written: a copy on disk would be as large as the checkpoint.
    return input_energy(Stepper(*weights_as_inputs(measured)), vocab_size, max_seq_len)
