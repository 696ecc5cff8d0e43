"""A decoder graph that is fed step by step in ONNX Runtime on the CPU, its KV buffers updated in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


class Stepper:
    """The session of the graph in `file`; errors of ONNX Runtime are passed on."""

    def __init__(self, file: Path) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 3
        self.session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self._kv: list[tuple[str, str, Any]] = []

    def hold(self, past: str, present: str, shape: Sequence[int]) -> None:
        """Allocate a float32 KV buffer of `shape`, bound to the input `past` and the output `present`."""
        import onnxruntime as ort

        self._kv.append((past, present, ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))))

    def step(self, feeds: Mapping[str, np.ndarray], wanted: Sequence[str]) -> dict[str, np.ndarray]:
        """Run one step; the `wanted` outputs by name, in memory of their own."""
        binding = self.session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for past, present, buffer in self._kv:
            binding.bind_ortvalue_input(past, buffer)
            binding.bind_ortvalue_output(present, buffer)
        for name in wanted:
            binding.bind_output(name, "cpu")
        self.session.run_with_iobinding(binding)
        found = binding.get_outputs()[len(self._kv) :]
        return {name: value.numpy().copy() for name, value in zip(wanted, found, strict=True)}
