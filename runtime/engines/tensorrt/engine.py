"""TensorRT engine: every tier's plan over one device copy of the weights, KV updated in place, logits left there.

Built and checked without a GPU; what of it has run on one is in docs/tensorrt.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from via_sd.contract.graphs import (
    CACHE_SLOTS,
    CANDIDATES,
    DRAFTER,
    FULL,
    INPUT_IDS,
    LOGIT_ROWS,
    NUMBERS_PER_ROW,
    POSITION_IDS,
    ROW_LOGITS,
    ROW_NUMBERS,
    VERIFIER,
)
from via_sd.contract.manifest import Bundle
from via_sd.errors import BundleError
from via_sd.runtime.engines.device_rows import DeviceRow, device_rows
from via_sd.runtime.engines.engine_files import EngineFiles, Host, check_host, read_engine_files
from via_sd.runtime.engines.protocol import OneSequencePerPass
from via_sd.runtime.engines.rows import Row
from via_sd.runtime.engines.steps import Step, StepPlanner
from via_sd.runtime.engines.tensorrt.cuda import Cuda, DeviceMemory, PinnedArray, Stream, load_array, load_file
from via_sd.runtime.engines.tensorrt.launcher import KernelCache, Launcher

_MODULES = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
_ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
_ALIGNMENT = 256  # of the address of an input
#: Inputs that are new in every step.
_STAGED = (INPUT_IDS, POSITION_IDS, LOGIT_ROWS, CANDIDATES)


def load_engines(
    bundle: Bundle, target: str, *, ordinal: int = 0, trust: bool = False, verify: bool = True
) -> tuple[TensorRTEngine, TensorRTEngine | None]:
    """The engines of `bundle` for `target`: the verifier's, and a model drafter's if there is one.

    Args:
        target: `tensorrt-rtx` or `tensorrt`.
        ordinal: which GPU.
        trust: run plans that were not built on this machine.
        verify: compare the hash of every file with the manifest.

    Raises:
        BundleError: engines that are missing, damaged, not trusted, or not for this machine; no library, no GPU.
    """
    if target not in _MODULES:
        raise BundleError(f"target {target!r} is not known; targets are {', '.join(_MODULES)}")
    files = read_engine_files(bundle, target, trust=trust, verify=verify)
    try:
        trt = importlib.import_module(_MODULES[target])
    except (ImportError, OSError) as error:
        raise BundleError(
            f"engines for {target} need {_MODULES[target]}, which does not load ({error}): "
            f"pip install 'via-sd-export[{target}]'"
        ) from None
    cuda = Cuda(ordinal)
    check_host(files, Host(_MODULES[target], str(trt.__version__), cuda.name, cuda.compute_capability))
    embedded = bool(files.request["embed_weights"])
    weights = None if embedded else load_file(cuda, files.folder / files.manifest["weights"]["file"])
    verifier = TensorRTEngine(files, VERIFIER, trt, cuda, weights)
    drafter = TensorRTEngine(files, DRAFTER, trt, cuda, weights) if files.engines_of(DRAFTER) else None
    return verifier, drafter


class TensorRTEngine(OneSequencePerPass):
    """One model's plans, deserialised; see `Engine`.

    Args:
        model: `verifier` or `drafter`.
        trt: the library.
        weights: the weights file on the device; None if every plan carries its own.
    """

    def __init__(self, files: EngineFiles, model: str, trt: Any, cuda: Cuda, weights: DeviceMemory | None) -> None:
        manifest = files.manifest
        names = files.engines_of(model)
        # The drafter's engine is called after it, and its tier is that model's full one.
        self.plans = {FULL if model == DRAFTER else name: manifest["engines"][name] for name in names}
        self.tiers = tuple(self.plans)
        self.kv: dict[str, Any] = manifest["kv"][model]
        self.vocab_size = int(manifest["vocab_size"][model])
        self.max_seq_len = int(manifest["max_seq_len"][model])
        self.planner = StepPlanner(files.request["profiles"][model], self.max_seq_len)
        self.prefill_chunk = self.planner.max_tokens
        self.trt, self.cuda = trt, cuda
        self._logger = trt.Logger(trt.Logger.WARNING)
        self._runtime = trt.Runtime(self._logger)
        # A version-compatible plan carries code for the host, which a runtime refuses unless it is told otherwise; that
        # the plan may run was decided when its files were read.
        self._runtime.engine_host_code_allowed = bool(files.request["version_compatible"])
        self.kernels = KernelCache()
        self._weights = weights  # alive as long as an address into it is bound
        base = 0 if weights is None else weights.address
        self.addresses = {t["name"]: base + t["offset"] for t in manifest["weights"]["tensors"][model]}
        self.engines = {
            tier: self._deserialise(files, files.plan(name)) for tier, name in zip(self.plans, names, strict=True)
        }
        self.cache_slots = load_array(cuda, np.arange(self.max_seq_len, dtype=np.int64))

    def new_buffers(self) -> TensorRTKVBuffers:
        return TensorRTKVBuffers(self)

    def _deserialise(self, files: EngineFiles, file: Path) -> Any:
        engine = self._runtime.deserialize_cuda_engine(file.read_bytes())
        if engine is None:
            raise BundleError(f"{file} cannot be deserialised on this GPU; build it again: {files.rebuild}")
        return engine


class TensorRTKVBuffers:
    """KV buffers, stream and staging memory of one sequence; see `KVBuffers`."""

    def __init__(self, engine: TensorRTEngine) -> None:
        self._engine = engine
        cuda, planner, kv = engine.cuda, engine.planner, engine.kv
        cuda.use()
        self._stream = Stream(cuda)
        size = kv["num_heads"] * engine.max_seq_len * kv["head_dim"] * _ITEM_SIZE[kv["dtype"]]
        self._stride = -(-size // _ALIGNMENT) * _ALIGNMENT
        # Zeroed: positions not written yet are attended to with weight 0, and 0 times an arbitrary value can be NaN.
        self._kv = DeviceMemory(cuda, self._stride * kv["num_layers"] * len(kv["parts"]))
        self._stream.fill(self._kv.address, 0, self._kv.size)
        # The small inputs one behind the other: a step copies them in one go.
        width = -(-max(planner.max_tokens, planner.max_rows) * 8 // _ALIGNMENT) * _ALIGNMENT // 8
        self._staged = PinnedArray(cuda, (len(_STAGED), width), np.int64)
        self._inputs = DeviceMemory(cuda, self._staged.array.nbytes)
        self._numbers = DeviceMemory(cuda, planner.max_rows * NUMBERS_PER_ROW * 4)
        self._host_numbers = PinnedArray(cuda, (planner.max_rows, NUMBERS_PER_ROW), np.float32)
        self._logits = DeviceMemory(cuda, planner.max_rows * engine.vocab_size * 4)
        addresses = {
            **{tensor.name: self._inputs.address + index * width * 8 for index, tensor in enumerate(_STAGED)},
            CACHE_SLOTS.name: engine.cache_slots.address,
            ROW_LOGITS.name: self._logits.address,
            ROW_NUMBERS.name: self._numbers.address,
            **self._kv_addresses(),
        }
        self._launcher = Launcher(engine, self._stream, addresses)
        self._stream.wait()

    @cached_property
    def _host_logits(self) -> PinnedArray:
        """Tens of megabytes at a large vocabulary, which a greedy sequence never needs."""
        shape = (self._engine.planner.max_rows, self._engine.vocab_size)
        return PinnedArray(self._engine.cuda, shape, np.float32)

    def forward(self, tier: str, tokens: Sequence[int], past: int, rows: int) -> list[Row]:
        """See `KVBuffers.forward`."""
        self._engine.cuda.use()
        found: list[Row] = []
        last: list[DeviceRow] = []
        for step in self._engine.planner.cut(len(tokens), rows):
            for row in last:  # the step writes its logits where theirs lie
                row.keep()
            candidates = step.candidates(tokens)
            self._step(tier, tokens, past, step, candidates)
            if step.keep:
                size = len(candidates) * NUMBERS_PER_ROW * 4
                self._stream.to_host(self._host_numbers.address, self._numbers.address, size)
            self._stream.wait()  # the next step stages its inputs in the same memory
            if step.keep:
                last = device_rows(self._host_numbers.array[: len(candidates)], candidates, self._fetch)
                found += last
        return found

    def _fetch(self, row: int) -> np.ndarray:
        """Logits of a row of the last step."""
        self._engine.cuda.use()
        size = self._engine.vocab_size * 4
        self._stream.to_host(self._host_logits.address + row * size, self._logits.address + row * size, size)
        self._stream.wait()
        logits: np.ndarray = self._host_logits.array[row]
        return logits

    def keys_values(self, layer: int) -> np.ndarray:
        """See `ReadableKVBuffers.keys_values`."""
        engine = self._engine
        kv, parts = engine.kv, []
        shape = (kv["num_heads"], engine.max_seq_len, kv["head_dim"])
        engine.cuda.use()
        for part in kv["parts"]:
            raw = np.empty(shape, np.float32 if kv["dtype"] == "float32" else np.uint16)
            address = self._kv_addresses()[kv["past"].format(layer=layer, part=part)]
            engine.cuda.call("cuMemcpyDtoH", raw.ctypes.data, address, raw.nbytes)
            if kv["dtype"] == "bfloat16":  # numpy has no such type: the upper half of a float32
                raw = (raw.astype(np.uint32) << 16).view(np.float32)
            elif kv["dtype"] == "float16":
                raw = raw.view(np.float16)
            parts.append(raw.astype(np.float32))
        return np.stack(parts)

    def _step(self, tier: str, tokens: Sequence[int], past: int, step: Step, candidates: Sequence[int]) -> None:
        engine, staged, rows = self._engine, self._staged.array, step.rows
        first, end = past + step.start, past + step.start + step.count
        small = (tokens[step.start : step.start + step.count], range(first, end), rows, candidates)
        for index, values in enumerate(small):
            staged[index, : len(values)] = values
        self._stream.to_device(self._inputs.address, self._staged.address, staged.nbytes)
        self._launcher.launch(tier, step.count, len(rows), engine.planner.visible(end))

    def _kv_addresses(self) -> dict[str, int]:
        """Past and present of every layer and part at the same address: the cache is updated where it lies."""
        kv, found = self._engine.kv, {}
        for layer in range(kv["num_layers"]):
            for index, part in enumerate(kv["parts"]):
                address = self._kv.address + (layer * len(kv["parts"]) + index) * self._stride
                for name in (kv["past"], kv["present"]):
                    found[name.format(layer=layer, part=part)] = address
        return found
