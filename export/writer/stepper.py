"""A decoder graph that is fed step by step in ONNX Runtime on the CPU, its KV buffers updated in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

#: Floating-point types of a graph's inputs, as ONNX Runtime calls them.
_FLOATS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class Stepper:
    """A session over a graph; errors of ONNX Runtime are passed on.

    Args:
        graph: a file, or a serialised graph.
        weights: what is fed in every step, by name, where it lies: weights that the graph takes as inputs.
    """

    def __init__(self, graph: Path | bytes, weights: Mapping[str, np.ndarray] = MappingProxyType({})) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 3
        source = graph if isinstance(graph, bytes) else str(graph)
        self.session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        self._weights = weights
        inputs = self.session.get_inputs()
        self._floats = {value.name: _FLOATS[value.type] for value in inputs if value.type in _FLOATS}
        self._kv: dict[str, tuple[str, Any]] = {}

    def hold(self, past: str, present: str, shape: Sequence[int]) -> None:
        """Allocate an empty KV buffer of `shape`, bound to the input `past` and the output `present`."""
        import onnxruntime as ort

        self._kv[past] = present, ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, self._floats[past]))

    def step(self, feeds: Mapping[str, np.ndarray], wanted: Sequence[str]) -> dict[str, np.ndarray]:
        """Run one step; the `wanted` outputs by name, in memory of their own."""
        binding = self.session.io_binding()
        for name, array in {**self._weights, **feeds}.items():
            binding.bind_cpu_input(name, array)
        for past, (present, buffer) in self._kv.items():
            binding.bind_ortvalue_input(past, buffer)
            binding.bind_ortvalue_output(present, buffer)
        for name in wanted:
            binding.bind_output(name, "cpu")
        self.session.run_with_iobinding(binding)
        found = binding.get_outputs()[len(self._kv) :]
        return {name: value.numpy().copy() for name, value in zip(wanted, found, strict=True)}
