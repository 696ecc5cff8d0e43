"""ONNX Runtime sessions over portable graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort


@dataclass
class PortableSession:
    """ONNX Runtime over a portable graph, a batch of sequences, caches updated in place."""

    session: ort.InferenceSession
    batch: int
    caches: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for value in self.session.get_inputs():
            if value.name.startswith("past_key_values."):
                dtype = np.float16 if value.type == "tensor(float16)" else np.float32
                self.caches[value.name] = np.zeros((self.batch, *value.shape[1:]), dtype)

    def feed(self, tokens: np.ndarray, past: Sequence[int], rows: Sequence[int], visible: int = 0) -> np.ndarray:
        """Feed tokens [batch, count] at positions `past` (one per sequence) on; logits [batch, rows, vocab].

        The step attends to the first `visible` positions of the caches, by default to no more than it needs.
        """
        binding = self.session.io_binding()
        binding.bind_cpu_input("input_ids", np.ascontiguousarray(tokens, np.int64))
        binding.bind_cpu_input("position_ids", np.add.outer(np.array(past, np.int64), np.arange(tokens.shape[1])))
        binding.bind_cpu_input("cache_slots", np.arange(visible or max(past) + tokens.shape[1]))
        binding.bind_cpu_input("logit_rows", np.array(rows, np.int64))
        binding.bind_cpu_input("candidates", np.zeros((self.batch, len(rows)), np.int64))
        for name, cache in self.caches.items():
            present = name.replace("past_key_values", "present")
            binding.bind_input(name, "cpu", 0, cache.dtype, cache.shape, cache.ctypes.data)
            binding.bind_output(present, "cpu", 0, cache.dtype, cache.shape, cache.ctypes.data)
        binding.bind_output("logits", "cpu")
        self.session.run_with_iobinding(binding)
        logits: np.ndarray = binding.get_outputs()[-1].numpy()
        return logits

    def feed_in(self, steps: Sequence[int], tokens: np.ndarray) -> np.ndarray:
        """Feed tokens [batch, sum(steps)] from position 0 in steps; logits of every position."""
        logits, past = [], 0
        for size in steps:
            logits.append(self.feed(tokens[:, past : past + size], [past] * self.batch, range(size)))
            past += size
        return np.concatenate(logits, axis=1)


def open_portable(model: ir.Model, path: Path, batch: int = 1) -> PortableSession:
    path.parent.mkdir(parents=True, exist_ok=True)
    ir.save(model, path, external_data=f"{path.name}.data")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return PortableSession(ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]), batch)
