"""ONNX Runtime engine: one session for every tier, KV buffers and logits bound once, nothing copied per step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from via_sd.contract.graphs import FULL, INPUT_IDS, KEEP, LAST_POSITION, LOGITS, NUM_LOGITS, TOTAL_LENGTH
from via_sd.errors import BundleError
from via_sd.runtime.engines.rows import HostRow
from via_sd.runtime.engines.threads import available_threads

_STEP_TOKENS = 64  # the size the token buffer starts with; prefill chunks enlarge it
#: Larger chunks are hardly faster (SmolLM2-135M on two cores, tokens/s at 128, 256, 512: int4 680, 700, 680; fp32 620,
#: 650, 635), and at 512 a chunk takes 0.9 s.
_PREFILL_CHUNK = 128


class OrtEngine:
    """Runs one decoder graph of a bundle (a routed one: every tier) on ONNX Runtime.

    Args:
        graph: the ONNX file.
        description: the manifest's entry for it (`inputs`, `kv`, `vocab_size`, and `tiers` for a routed graph).
        max_seq_len: capacity of a KV buffer in tokens.
        threads: intra-op threads; `available_threads()` if None.
    """

    def __init__(
        self, graph: Path, description: dict[str, Any], max_seq_len: int, *, threads: int | None = None
    ) -> None:
        options = session_options(threads)
        options.inter_op_num_threads = 1
        self.session = open_session(graph, options)
        tiers = description.get("tiers") or {FULL: {KEEP.name: []}}
        self._keep = {name: KEEP.array(tier[KEEP.name]) for name, tier in tiers.items()}
        self.kv: dict[str, Any] = description["kv"]
        self.vocab_size = int(description["vocab_size"])
        self.max_seq_len = max_seq_len
        self.prefill_chunk = _PREFILL_CHUNK
        self.tiers = tuple(self._keep)

    def new_buffers(self) -> OrtKVBuffers:
        return OrtKVBuffers(self)

    def keep(self, tier: str) -> np.ndarray:
        """The `keep` input that selects `tier`, bool [segments]."""
        return self._keep[tier]


class OrtKVBuffers:
    """KV buffers of one sequence, and the binding that runs the session over them."""

    def __init__(self, engine: OrtEngine) -> None:
        self._engine = engine
        self._run = engine.session.run_with_iobinding
        self._binding = engine.session.io_binding()
        kv = engine.kv
        shape = (1, kv["num_heads"], engine.max_seq_len, kv["head_dim"])
        # One allocation, untouched until written: memory is taken as the sequence grows.
        self._buffers = np.zeros((kv["num_layers"], len(kv["parts"]), *shape), dtype=kv["dtype"])
        for layer in range(kv["num_layers"]):
            for index, part in enumerate(kv["parts"]):
                buffer = self._buffers[layer, index]
                past = kv["past"].format(layer=layer, part=part)
                present = kv["present"].format(layer=layer, part=part)
                self._bind_input(past, buffer)
                self._binding.bind_output(present, "cpu", 0, buffer.dtype, buffer.shape, buffer.ctypes.data)
        self._last_position = LAST_POSITION.array([0])
        self._total_length = TOTAL_LENGTH.array(0)
        self._num_logits = NUM_LOGITS.array([0])
        self._keep = engine.keep(FULL).copy()
        self._bind_input(LAST_POSITION.name, self._last_position)
        self._bind_input(TOTAL_LENGTH.name, self._total_length)
        self._bind_input(NUM_LOGITS.name, self._num_logits)
        if self._keep.size:
            self._bind_input(KEEP.name, self._keep)
        self._tokens = np.zeros((1, _STEP_TOKENS), INPUT_IDS.dtype)
        self._logits = np.zeros((1, 1, engine.vocab_size), LOGITS.dtype)
        self._bind_step(1, 1)
        self._tier = FULL

    def forward(self, tier: str, tokens: Sequence[int], past: int, rows: int) -> list[HostRow]:
        """See `KVBuffers.forward`."""
        if (len(tokens), rows) != self._bound:
            self._bind_step(len(tokens), rows)
        self._input_ids[0] = tokens
        self._last_position[0] = past + len(tokens) - 1
        self._total_length[...] = past + len(tokens)
        if tier != self._tier:
            self._keep[:] = self._engine.keep(tier)
            self._tier = tier
        self._run(self._binding)
        return self._rows

    def _bind_step(self, count: int, rows: int) -> None:
        """Bind inputs and outputs for passes over `count` tokens with `rows` rows of logits."""
        if count > self._tokens.shape[1]:
            self._tokens = np.zeros((1, count), INPUT_IDS.dtype)
        if rows > self._logits.shape[1]:
            self._logits = np.zeros((1, rows, self._engine.vocab_size), LOGITS.dtype)
        self._input_ids, logits = self._tokens[:, :count], self._logits[:, :rows]
        self._bind_input(INPUT_IDS.name, self._input_ids)
        self._num_logits[0] = rows
        self._binding.bind_output(LOGITS.name, "cpu", 0, logits.dtype, logits.shape, logits.ctypes.data)
        self._rows = [HostRow(row) for row in logits[0]]
        self._bound = (count, rows)

    def keys_values(self, layer: int) -> np.ndarray:
        """See `ReadableKVBuffers.keys_values`; a view."""
        result: np.ndarray = self._buffers[layer, :, 0]
        return result

    def _bind_input(self, name: str, array: np.ndarray) -> None:
        self._binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def session_options(threads: int | None) -> Any:
    """Options of a session with `threads` intra-op threads; `available_threads()` if None.

    The threads of a pool spin within a pass and sleep between passes: pools that spin on after a pass take the cores
    from whoever runs next, be it another session of this process or another process.
    """
    options = onnxruntime().SessionOptions()
    options.intra_op_num_threads = threads or available_threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    return options


def open_session(graph: Path, options: Any, provider: str = "CPUExecutionProvider") -> Any:
    """A session over the file `graph`; raises `BundleError` where ONNX Runtime cannot load it."""
    try:
        return onnxruntime().InferenceSession(os.fspath(graph), options, providers=[provider])
    except Exception as error:  # ONNX Runtime raises its own kinds, none of them public
        raise BundleError(f"ONNX Runtime cannot load {graph} on {provider}: {error}") from error


def onnxruntime() -> Any:
    """The module; raises `BundleError` where it is not installed."""
    try:
        import onnxruntime as module
    except ImportError:
        raise BundleError(
            "this bundle runs on ONNX Runtime, which is not installed: pip install 'via-sd-export[cpu]' (or [gpu])"
        ) from None
    return module
