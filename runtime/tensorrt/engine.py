"""TensorRT engine: every tier's plan over one device copy of the weights, KV updated in place, logits left there.

Built and checked without a GPU; what of it has run on one is in docs/tensorrt.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from via_sd.runtime.bundle import Bundle
from via_sd.runtime.engine import FULL
from via_sd.runtime.errors import BundleError
from via_sd.runtime.rows import HostRow, Row
from via_sd.runtime.tensorrt.cuda import Cuda, DeviceError, DeviceMemory, PinnedArray, Stream, load_file
from via_sd.runtime.tensorrt.files import EngineFiles, Host, check_host, read_engine_files
from via_sd.runtime.tensorrt.rows import NUMBERS, device_rows
from via_sd.runtime.tensorrt.steps import Step, StepPlanner

_MODULES = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
_ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
_ALIGNMENT = 256  # of the address of an input
#: Inputs that are new in every step.
_STAGED = ("input_ids", "position_ids", "logit_rows", "candidates")
#: Step sizes whose launches are kept as CUDA graphs, per slot.
_MAX_GRAPHS = 64


def load_engines(
    bundle: Bundle, target: str, *, trust: bool = False, verify: bool = True
) -> tuple[TensorRTEngine, TensorRTEngine | None]:
    """The engines of `bundle` for `target`: the verifier's, and a model drafter's if there is one.

    Args:
        target: `tensorrt-rtx` or `tensorrt`.
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
    cuda = Cuda()
    check_host(files, Host(_MODULES[target], str(trt.__version__), cuda.name, cuda.compute_capability))
    embedded = bool(files.request["embed_weights"])
    weights = None if embedded else load_file(cuda, files.folder / files.manifest["weights"]["file"])
    verifier = TensorRTEngine(files, "verifier", trt, cuda, weights)
    drafter = TensorRTEngine(files, "drafter", trt, cuda, weights) if files.engines_of("drafter") else None
    return verifier, drafter


class TensorRTEngine:
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
        self.plans = {FULL if model == "drafter" else name: manifest["engines"][name] for name in names}
        self.tiers = tuple(self.plans)
        self.kv: dict[str, Any] = manifest["kv"][model]
        self.vocab_size = int(manifest["vocab_size"][model])
        self.max_seq_len = int(manifest["max_seq_len"][model])
        self.planner = StepPlanner(files.request["profiles"][model], self.max_seq_len)
        self.trt, self.cuda = trt, cuda
        self._logger = trt.Logger(trt.Logger.WARNING)
        self._runtime = trt.Runtime(self._logger)
        self._weights = weights  # alive as long as an address into it is bound
        base = 0 if weights is None else weights.address
        self.addresses = {t["name"]: base + t["offset"] for t in manifest["weights"]["tensors"][model]}
        self.engines = {
            tier: self._deserialise(files, files.plan(name)) for tier, name in zip(self.plans, names, strict=True)
        }
        slots = np.arange(self.max_seq_len, dtype=np.int64)
        self.cache_slots = DeviceMemory(cuda, slots.nbytes)
        cuda.call("cuMemcpyHtoD", self.cache_slots.address, slots.ctypes.data, slots.nbytes)

    def new_slot(self) -> TensorRTSlot:
        return TensorRTSlot(self)

    def _deserialise(self, files: EngineFiles, file: Path) -> Any:
        engine = self._runtime.deserialize_cuda_engine(file.read_bytes())
        if engine is None:
            raise BundleError(f"{file} cannot be deserialised on this GPU; build it again: {files.rebuild}")
        return engine


class TensorRTSlot:
    """KV buffers, stream, contexts and staging memory of one sequence; see `Slot`."""

    def __init__(self, engine: TensorRTEngine) -> None:
        self._engine = engine
        cuda, planner, kv = engine.cuda, engine.planner, engine.kv
        cuda.use()
        self._stream = Stream(cuda)
        size = kv["num_heads"] * engine.max_seq_len * kv["head_dim"] * _ITEM_SIZE[kv["dtype"]]
        self._stride = -(-size // _ALIGNMENT) * _ALIGNMENT
        # Zeroed: a slot that nothing was written to yet is looked at with weight 0, and 0 times garbage can be NaN.
        self._kv = DeviceMemory(cuda, self._stride * kv["num_layers"] * len(kv["parts"]), zero=True)
        self._scratch = DeviceMemory(cuda, max(1, *(plan.device_memory_size_v2 for plan in engine.engines.values())))
        self._contexts: dict[tuple[str, int], Any] = {}
        self._graphs: dict[tuple[str, int, int, int], Callable[[], None]] = {}
        self._seen_sizes: set[tuple[str, int, int, int]] = set()
        # The small inputs one behind the other: a step copies them in one go.
        width = -(-max(planner.max_tokens, planner.max_rows) * 8 // _ALIGNMENT) * _ALIGNMENT // 8
        self._staged = PinnedArray(cuda, (len(_STAGED), width), np.int64)
        self._inputs = DeviceMemory(cuda, self._staged.array.nbytes)
        self._numbers = DeviceMemory(cuda, planner.max_rows * NUMBERS * 4)
        self._host_numbers = PinnedArray(cuda, (planner.max_rows, NUMBERS), np.float32)
        self._logits = DeviceMemory(cuda, planner.max_rows * engine.vocab_size * 4)

    def forward(self, tier: str, tokens: Sequence[int], past: int, rows: int) -> list[Row]:
        """See `Slot.forward`."""
        self._engine.cuda.use()
        found: list[Row] = []
        for step in self._engine.planner.cut(len(tokens), rows):
            # A step writes its logits where those of the one before lie.
            found = [HostRow(row.logits.copy()) for row in found]
            candidates = step.candidates(tokens)
            self._step(tier, tokens, past, step, candidates)
            self._stream.to_host(self._host_numbers.address, self._numbers.address, len(candidates) * NUMBERS * 4)
            self._stream.wait()  # the next step stages its inputs in the same memory
            if step.keep:
                found += device_rows(self._host_numbers.array[: len(candidates)], candidates, self._fetch)
        return found

    @cached_property
    def _host_logits(self) -> PinnedArray:
        """There once somebody asks for logits, which greedy decoding does not."""
        return PinnedArray(self._engine.cuda, (self._engine.planner.max_rows, self._engine.vocab_size), np.float32)

    def _fetch(self, row: int) -> np.ndarray:
        """Logits of a row of the last step."""
        self._engine.cuda.use()
        size = self._engine.vocab_size * 4
        self._stream.to_host(self._host_logits.address + row * size, self._logits.address + row * size, size)
        self._stream.wait()
        logits: np.ndarray = self._host_logits.array[row]
        return logits

    def keys_values(self, layer: int) -> np.ndarray:
        """See `ReadableSlot.keys_values`."""
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
        visible = engine.planner.visible(end)
        profile = engine.planner.profile(step.count, len(rows), visible)
        context = self._context(tier, profile)
        for name, shape in (
            ("input_ids", (1, step.count)),
            ("position_ids", (1, step.count)),
            ("cache_slots", (visible,)),
            ("logit_rows", (len(rows),)),
            ("candidates", (1, len(rows))),
        ):
            context.set_input_shape(name, shape)
        self._launch(context, (tier, step.count, len(rows), visible))

    def _launch(self, context: Any, size: tuple[str, int, int, int]) -> None:
        """Run a step that `size` says everything about but the contents of its inputs: as a CUDA graph when repeated.

        TensorRT for RTX captures by itself (see `_new_context`).
        """

        def enqueue() -> None:
            if not context.execute_async_v3(self._stream.handle):
                raise DeviceError(f"a step of {size[1]} tokens in tier {size[0]} could not be started")

        if size in self._graphs:
            self._graphs[size]()
            return
        enqueue()
        if not self._captures_itself and size in self._seen_sizes and len(self._graphs) < _MAX_GRAPHS:
            # After a run, never before one: a context settles what a change of shapes left to do when it is enqueued.
            self._graphs[size] = self._stream.capture(enqueue)
        self._seen_sizes.add(size)

    @property
    def _captures_itself(self) -> bool:
        return hasattr(self._engine.trt, "CudaGraphStrategy")

    def _context(self, tier: str, profile: int) -> Any:
        """The execution context of a tier and profile, with every address that never changes bound."""
        if (tier, profile) not in self._contexts:
            self._contexts[tier, profile] = self._new_context(tier, profile)
        return self._contexts[tier, profile]

    def _new_context(self, tier: str, profile: int) -> Any:
        engine = self._engine
        trt, plan = engine.trt, engine.engines[tier]
        managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._captures_itself:
            config = plan.create_runtime_config()
            config.set_execution_context_allocation_strategy(managed)
            config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            context = plan.create_execution_context(config)
        else:
            context = plan.create_execution_context(managed)
        if context is None:
            raise DeviceError(f"no execution context for tier {tier}: is the GPU's memory full?")
        context.set_device_memory(self._scratch.address, self._scratch.size)
        if not context.set_optimization_profile_async(profile, self._stream.handle):
            raise DeviceError(f"tier {tier} has no optimisation profile {profile}")
        self._stream.wait()
        width = self._staged.array.shape[1] * 8
        addresses = {
            **{name: self._inputs.address + index * width for index, name in enumerate(_STAGED)},
            "cache_slots": engine.cache_slots.address,
            "logits": self._logits.address,
            "row_numbers": self._numbers.address,
            **{name: engine.addresses[name] for name in engine.plans[tier]["weights"]},
            **self._kv_addresses(),
        }
        for index in range(plan.num_io_tensors):
            name = plan.get_tensor_name(index)
            if not context.set_tensor_address(name, addresses[name]):
                raise DeviceError(f"tier {tier} does not take an address for {name}")
        return context

    def _kv_addresses(self) -> dict[str, int]:
        """Past and present of every layer and part at the same address: the cache is updated where it lies."""
        kv, found = self._engine.kv, {}
        for layer in range(kv["num_layers"]):
            for index, part in enumerate(kv["parts"]):
                address = self._kv.address + (layer * len(kv["parts"]) + index) * self._stride
                for name in (kv["past"], kv["present"]):
                    found[name.format(layer=layer, part=part)] = address
        return found
