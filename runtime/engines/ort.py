"""ONNX Runtime engine: one session for every tier, KV buffers and logits bound once, nothing copied per step."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from via_sd.contract.graphs import FULL, KEEP, LAST_POSITION, LOGITS, PACKED_IDS, TOTAL_LENGTH, kv_place
from via_sd.errors import BundleError
from via_sd.runtime.engines.kv_storage import KVStorage
from via_sd.runtime.engines.packing import Packing
from via_sd.runtime.engines.protocol import Block
from via_sd.runtime.engines.rows import HostRow
from via_sd.runtime.engines.threads import available_threads

#: Larger chunks are hardly faster (SmolLM2-135M on two cores, tokens/s at 128, 256, 512: int4 680, 700, 680; fp32 620,
#: 650, 635), and at 512 a chunk takes 0.9 s.
_PREFILL_CHUNK = 128
_TOKENS = 64  # the size a token buffer starts with; prefill chunks enlarge it
#: Threads of one pass at most, on machines with fewer processors.
MAX_THREADS = 256
_LONGEST_REASON = 300
#: Element types of KV buffers, as ONNX Runtime calls them.
_TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)"}
#: Sequences that may have KV buffers at once, if nobody says.
SLOTS = 16


class OrtEngine:
    """Runs one decoder graph of a bundle (a routed one: every tier) on ONNX Runtime.

    Args:
        graph: the ONNX file.
        description: the manifest's entry for it (`inputs`, `kv`, `vocab_size`, and `tiers` for a routed graph).
        max_seq_len: capacity of a KV buffer in tokens.
        threads: intra-op threads; `available_threads()` if None.
        slots: most sequences with KV buffers at once.
        deterministic: make no result depend on how many tokens a pass takes; see `Packing`.
    """

    def __init__(
        self,
        graph: Path,
        description: dict[str, Any],
        max_seq_len: int,
        *,
        threads: int | None = None,
        slots: int = SLOTS,
        deterministic: bool = False,
    ) -> None:
        options = session_options(threads)
        options.inter_op_num_threads = 1
        self.session = open_session(graph, options)
        tiers = description.get("tiers") or {FULL: {KEEP.name: []}}
        self._keep = {name: KEEP.array(tier[KEEP.name]) for name, tier in tiers.items()}
        self.graph = graph
        self.kv: dict[str, Any] = description["kv"]
        _check_description(self.session, graph, description, self._keep[FULL].size)
        self.vocab_size = int(description["vocab_size"])
        self.max_seq_len = max_seq_len
        self.prefill_chunk = _PREFILL_CHUNK
        self.max_sequences = slots
        self.tiers = tuple(self._keep)
        self.deterministic = deterministic
        # What is padded in one sequence's row may be a whole chunk of another's.
        self.storage = KVStorage(self.kv, slots, max_seq_len + _PREFILL_CHUNK)
        self._bindings: dict[tuple[int, int], _Binding] = {}
        self._logits = np.zeros((1, 1, self.vocab_size), LOGITS.dtype)

    def new_buffers(self) -> OrtKVBuffers:
        return OrtKVBuffers(self)

    def release(self, buffers: OrtKVBuffers) -> None:
        """See `Engine.release`."""
        buffers.free()

    def copy(self, source: OrtKVBuffers, target: OrtKVBuffers, positions: int) -> bool:
        """See `Engine.copy`."""
        self.storage.copy(source.slot, target.slot, positions)
        return True

    def keep(self, tier: str) -> np.ndarray:
        """The `keep` input that selects `tier`, bool [segments]."""
        return self._keep[tier]

    def forward(self, tier: str, blocks: Sequence[Block]) -> list[Sequence[HostRow]]:
        """See `Engine.forward`; blocks are at most `prefill_chunk` tokens long where there are several."""
        slots = [block.buffers.slot for block in blocks]
        return self.binding(min(slots), max(slots) + 1).run(tier, slots, blocks)

    def logits(self, rows: int) -> np.ndarray:
        """Memory for the logits of a pass, [1, rows, vocab]: every pass writes to the same."""
        if rows > self._logits.shape[1]:
            # Twice the rows: bindings that are bound to what was there before keep it, in all no more than as much.
            self._logits = np.zeros((1, max(rows, 2 * self._logits.shape[1]), self.vocab_size), LOGITS.dtype)
        return self._logits[:, :rows]

    def binding(self, first: int, end: int) -> _Binding:
        """The binding of slots `first` to `end`, made when it is needed."""
        found = self._bindings.get((first, end))
        if found is None:
            found = self._bindings[first, end] = _Binding(self, first, end)
        return found


class OrtKVBuffers:
    """KV buffers of one sequence: a slot of the engine's storage, which is free again when nobody has them."""

    def __init__(self, engine: OrtEngine) -> None:
        self._engine = engine
        self.slot = engine.storage.take()
        self._binding = engine.binding(self.slot, self.slot + 1)
        self._slots = (self.slot,)
        #: Makes the slot free, once.
        self.free = weakref.finalize(self, engine.storage.release, self.slot)

    def forward(self, tier: str, tokens: Sequence[int], past: int, rows: int) -> Sequence[HostRow]:
        """See `KVBuffers.forward`."""
        return self._binding.run(tier, self._slots, (Block(self, tokens, past, rows),))[0]

    def keys_values(self, layer: int) -> np.ndarray:
        """See `ReadableKVBuffers.keys_values`."""
        limit = self._engine.max_seq_len
        return np.stack([part[self.slot, :, :limit] for part in self._engine.storage.layers[layer]])


class _Binding:
    """Runs the session over neighbouring slots; KV buffers, inputs and logits stay bound between passes."""

    def __init__(self, engine: OrtEngine, first: int, end: int) -> None:
        self._engine, self._first = engine, first
        self._run = engine.session.run_with_iobinding
        self._binding = engine.session.io_binding()
        kv = engine.kv
        for layer, parts in enumerate(engine.storage.layers):
            for part, array in zip(kv["parts"], parts, strict=True):
                buffer = array[first:end]
                self._bind_input(kv["past"].format(layer=layer, part=part), buffer)
                self._bind_output(kv["present"].format(layer=layer, part=part), buffer)
        self._last_position = np.zeros(end - first, LAST_POSITION.dtype)
        self._total_length = TOTAL_LENGTH.array(0)
        self._keep = engine.keep(FULL).copy()
        self._bind_input(LAST_POSITION.name, self._last_position)
        self._bind_input(TOTAL_LENGTH.name, self._total_length)
        if self._keep.size:
            self._bind_input(KEEP.name, self._keep)
        self._tier = FULL
        self._tokens = np.zeros((1, _TOKENS), PACKED_IDS.dtype)
        self._shape: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def run(self, tier: str, slots: Sequence[int], blocks: Sequence[Block]) -> list[Sequence[HostRow]]:
        """A pass over `blocks`, each in the slot of `slots` beside it."""
        counts, rows = [0] * len(self._last_position), [0] * len(self._last_position)
        for slot, block in zip(slots, blocks, strict=True):
            counts[slot - self._first], rows[slot - self._first] = len(block.tokens), block.rows
        if (shape := (tuple(counts), tuple(rows))) != self._shape:
            self._bind_shape(*shape)
        for slot, block in zip(slots, blocks, strict=True):
            index = slot - self._first
            start = self._starts[index]
            self._input_ids[start : start + len(block.tokens)] = block.tokens
            self._last_position[index] = block.past + self._attended[index] - 1
        self._total_length[...] = self._last_position.max() + 1
        if tier != self._tier:
            self._keep[:] = self._engine.keep(tier)
            self._tier = tier
        try:
            self._run(self._binding)
        except Exception as error:  # ONNX Runtime raises its own kinds, none of them public
            reason = " ".join(str(error).split())[:_LONGEST_REASON]
            raise BundleError(
                f"ONNX Runtime failed in a pass of tier {tier} of {self._engine.graph}: {reason}; if this recurs, "
                "export the bundle again"
            ) from error
        return [self._rows[slot - self._first] for slot in slots]

    def _bind_shape(self, counts: tuple[int, ...], rows: tuple[int, ...]) -> None:
        """Bind inputs and outputs for passes over `counts` tokens per slot, the last `rows` of them with logits."""
        packing = Packing(counts, rows, deterministic=self._engine.deterministic)
        if packing.tokens > self._tokens.shape[1]:
            self._tokens = np.zeros((1, packing.tokens), PACKED_IDS.dtype)
        tokens, logits = self._tokens[:, : packing.tokens], self._engine.logits(packing.logits)
        self._input_ids, self._attended = tokens[0], packing.attended
        self._bind_input(PACKED_IDS.name, tokens)
        for name, array in packing.inputs.items():
            self._bind_input(name, array)
        self._bind_output(LOGITS.name, logits)
        self._last_position.fill(0)  # any will do for a slot that takes no part
        # A binding does not own what is bound to it.
        self._bound = (packing, logits)
        self._starts = [sum(counts[:index]) for index in range(len(counts))]
        made = iter(logits[0])
        self._rows = [[HostRow(next(made)) for _ in range(count)] for count in rows]
        self._shape = (counts, rows)

    def _bind_input(self, name: str, array: np.ndarray) -> None:
        self._binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def _bind_output(self, name: str, array: np.ndarray) -> None:
        self._binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def _check_description(session: Any, graph: Path, description: Mapping[str, Any], flags: int) -> None:
    """Raise `BundleError` where the graph has other KV buffers, logits or branches than the manifest says."""
    kv = description["kv"]
    inputs = {value.name: value for value in session.get_inputs()}
    outputs = {value.name: value for value in session.get_outputs()}
    found = sorted(place for name in inputs if (place := kv_place(name)) is not None)
    wanted = [(layer, part) for layer in range(kv["num_layers"]) for part in sorted(kv["parts"])]
    if found != wanted:
        raise _unlike(graph, f"{len(found)} KV buffers", f"{len(wanted)}")
    for layer, part in wanted:
        value = inputs[kv["past"].format(layer=layer, part=part)]
        held = (value.type, value.shape[1], value.shape[3])
        if held != (_TYPES.get(kv["dtype"]), kv["num_heads"], kv["head_dim"]):
            raise _unlike(
                graph,
                f"{value.name} of {held[1]} heads of {held[2]} numbers, {held[0]}",
                f"{kv['num_heads']} heads of {kv['head_dim']}, {kv['dtype']}",
            )
    branches = inputs[KEEP.name].shape[0] if KEEP.name in inputs else 0
    if branches != flags:
        raise _unlike(graph, f"{branches} branches", f"{flags}")
    vocabulary = outputs[LOGITS.name].shape[-1] if LOGITS.name in outputs else None
    if vocabulary != description["vocab_size"]:
        raise _unlike(graph, f"logits over {vocabulary} tokens", f"{description['vocab_size']}")


def _unlike(graph: Path, found: str, said: str) -> BundleError:
    return BundleError(f"{graph} has {found}, and the manifest says {said}; export the bundle again")


def session_options(threads: int | None) -> Any:
    """Options of a session with `threads` intra-op threads; `available_threads()` if None.

    The threads of a pool spin within a pass and sleep between passes: pools that spin on after a pass take the cores
    from whoever runs next, be it another session of this process or another process.
    """
    limit = max(MAX_THREADS, os.cpu_count() or 1)
    if threads is not None and not 1 <= threads <= limit:
        raise BundleError(f"threads is {threads}, wanted 1 to {limit}; leave it out for the cores there are")
    options = onnxruntime().SessionOptions()
    options.intra_op_num_threads = threads or available_threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    return options


def open_session(graph: Path, options: Any, providers: Sequence[Any] = ("CPUExecutionProvider",)) -> Any:
    """A session over the file `graph`; raises `BundleError` where ONNX Runtime cannot load it.

    Args:
        providers: execution providers, with options or without; none where `options` has them.
    """
    module = onnxruntime()
    try:
        # Without its fallback: where a provider fails, it would make the session again on the CPU.
        return module.InferenceSession(
            os.fspath(graph), options, providers=list(providers) or None, enable_fallback=False
        )
    except Exception as error:  # ONNX Runtime raises its own kinds, none of them public
        on = ", ".join(entry if isinstance(entry, str) else entry[0] for entry in providers) or "the device chosen"
        raise BundleError(f"ONNX Runtime {module.__version__} cannot load {graph} on {on}: {error}") from error


def onnxruntime() -> Any:
    """The module; raises `BundleError` where it is not installed."""
    try:
        import onnxruntime as module
    except ImportError:
        raise BundleError(
            "this bundle runs on ONNX Runtime, which is not installed: pip install 'via-sd-export[cpu]' (or [gpu])"
        ) from None
    return module
