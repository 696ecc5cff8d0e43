"""A stand-in for a GPU: the driver's and TensorRT's calls that the engine makes, over host memory and ONNX Runtime.

It says nothing of TensorRT or of speed. What it shows is what the engine's own code does with them: which address every
tensor is bound to, how large memory is, and what waits for what. Work on a stream runs as late as a device may run it,
when the host waits for that stream; memory is full of NaN until it is written; nothing outside an allocation can be
touched; and a context that was recorded takes no other shape.
"""

# ruff: noqa: N802, N815 - the names are the libraries'
from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort

_TYPES = {"tensor(int64)": np.int64, "tensor(float)": np.float32}
Work = Callable[[], None]


class Memory:
    """Allocations of the device, and page-locked ones of the host; both are host memory here."""

    def __init__(self) -> None:
        self._blocks: dict[int, np.ndarray] = {}

    def allocate(self, size: int) -> int:
        assert size > 0
        block = np.full(size + 256, 0xFF, np.uint8)
        address = -(-block.ctypes.data // 256) * 256
        start = address - block.ctypes.data
        self._blocks[address] = block[start : start + size]
        return address

    def free(self, address: int) -> None:
        del self._blocks[address]

    @property
    def held(self) -> int:
        """Bytes that were allocated and not freed."""
        return sum(len(block) for block in self._blocks.values())

    def at(self, address: int, size: int) -> np.ndarray:
        """The bytes there, which must lie within one allocation."""
        for start, block in list(self._blocks.items()):
            if start <= address and address + size <= start + len(block):
                return block[address - start : address - start + size]
        raise AssertionError(f"{size} bytes at {address:#x} are not within an allocation")

    def tensor(self, address: int, shape: Sequence[int], dtype: type) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.at(address, size).view(dtype).reshape(shape)


@dataclass
class Stream:
    """Work that was enqueued and not run yet, or is being recorded."""

    waiting: list[Work] = field(default_factory=list)
    recorded: list[Work] | None = None

    def enqueue(self, work: Work) -> None:
        (self.waiting if self.recorded is None else self.recorded).append(work)

    def run(self) -> None:
        assert self.recorded is None, "a stream that is being captured was waited for"
        waiting, self.waiting = self.waiting, []
        for work in waiting:
            work()


class Driver(ModuleType):
    """The functions of `cuda.bindings.driver` that the engine calls; each returns (error, result)."""

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.memory = Memory()
        self.streams: dict[int, Stream] = {}
        self._handles = itertools.count(1)
        self._graphs: dict[int, list[Work]] = {}
        self.launches = 0
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=SimpleNamespace(name="CUDA_SUCCESS"))
        self.CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
        self.CUdevice_attribute = SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=8, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=9
        )

    def fail(self, name: str, *, after: bool = False, error: str = "CUDA_ERROR_OUT_OF_MEMORY") -> None:
        """Make the next call of function `name` fail with `error`, before it does anything or after it did it."""
        function = getattr(self, name)

        def failing(*arguments: Any) -> tuple[Any, ...]:
            delattr(self, name)  # the method is there again
            if after:
                function(*arguments)
            return SimpleNamespace(name=error), None

        setattr(self, name, failing)

    def _done(self, *result: Any) -> tuple[Any, ...]:
        return (self.CUresult.CUDA_SUCCESS, *result)

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return self._done()

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return self._done(ordinal)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return self._done("context")

    def cuCtxSetCurrent(self, context: str) -> tuple[Any, ...]:
        return self._done()

    def cuDeviceGetName(self, length: int, device: int) -> tuple[Any, ...]:
        return self._done(b"a stand-in for a GPU".ljust(length, b"\0"))

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:
        return self._done(attribute)

    def cuMemAlloc(self, size: int) -> tuple[Any, ...]:
        return self._done(self.memory.allocate(size))

    def cuMemHostAlloc(self, size: int, flags: int) -> tuple[Any, ...]:
        return self._done(self.memory.allocate(size))

    def cuMemFree(self, address: int) -> tuple[Any, ...]:
        return self._done(self.memory.free(address))[:1]

    cuMemFreeHost = cuMemFree

    def cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> tuple[Any, ...]:
        def fill() -> None:
            self.memory.at(address, size)[:] = value

        self.streams[stream].enqueue(fill)
        return self._done()

    def cuMemcpyDtoH(self, target: int, source: int, size: int) -> tuple[Any, ...]:
        np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(target))[:] = self.memory.at(source, size)
        return self._done()

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> tuple[Any, ...]:
        def copy() -> None:
            # The source may be any memory of the host.
            self.memory.at(target, size)[:] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(source))

        self.streams[stream].enqueue(copy)
        return self._done()

    def cuMemcpyDtoHAsync(self, target: int, source: int, size: int, stream: int) -> tuple[Any, ...]:
        def copy() -> None:
            self.memory.at(target, size)[:] = self.memory.at(source, size)

        self.streams[stream].enqueue(copy)
        return self._done()

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        handle = next(self._handles)
        self.streams[handle] = Stream()
        return self._done(handle)

    def cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        del self.streams[stream]
        return self._done()

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        self.streams[stream].run()
        return self._done()

    def cuStreamBeginCapture(self, stream: int, mode: int) -> tuple[Any, ...]:
        self.streams[stream].recorded = []
        return self._done()

    def cuStreamEndCapture(self, stream: int) -> tuple[Any, ...]:
        recorded, self.streams[stream].recorded = self.streams[stream].recorded, None
        return self._done(recorded)

    def cuGraphInstantiate(self, graph: list[Work], flags: int) -> tuple[Any, ...]:
        handle = next(self._handles)
        self._graphs[handle] = graph
        return self._done(handle)

    def cuGraphDestroy(self, graph: list[Work]) -> tuple[Any, ...]:
        return self._done()

    def cuGraphExecDestroy(self, handle: int) -> tuple[Any, ...]:
        del self._graphs[handle]
        return self._done()

    def cuGraphLaunch(self, handle: int, stream: int) -> tuple[Any, ...]:
        self.launches += 1
        for work in self._graphs[handle]:
            self.streams[stream].enqueue(work)
        return self._done()


class Strategy(Enum):
    USER_MANAGED = 2
    WHOLE_GRAPH_CAPTURE = 1


class Library(ModuleType):
    """TensorRT, or TensorRT for RTX: runs, for a plan, the network it was built from.

    Args:
        networks: plan -> the network's bytes, weights as inputs.
        profiles: plan -> its optimisation profiles as engines.json has them.
    """

    def __init__(
        self,
        name: str,
        version: str,
        driver: Driver,
        networks: Mapping[bytes, bytes],
        profiles: Mapping[bytes, Sequence[dict[str, Any]]],
    ) -> None:
        super().__init__(name)
        self.__version__ = version
        self.driver, self._networks, self._profiles = driver, networks, profiles
        if name == "tensorrt_rtx":
            self.CudaGraphStrategy = Strategy
        self.ExecutionContextAllocationStrategy = Strategy
        self.contexts: list[Context] = []
        #: Plans carry code for the host, which a runtime has to be allowed to run.
        self.version_compatible = False

    class Logger:
        WARNING = 2

        def __init__(self, level: int) -> None: ...

    def Runtime(self, logger: Any) -> Any:
        return Runtime(self)

    def plan(self, content: bytes) -> Plan:
        return Plan(self, self._networks[content], self._profiles[content])


class Runtime:
    """What deserialises plans."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, content: bytes) -> Plan | None:
        refused = self._library.version_compatible and not self.engine_host_code_allowed
        return None if refused else self._library.plan(content)


class Plan:
    """An engine, deserialised."""

    device_memory_size_v2 = 1000

    def __init__(self, library: Library, network: bytes, profiles: Sequence[dict[str, Any]]) -> None:
        self.library, self.profiles = library, profiles
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.session = ort.InferenceSession(network, options, providers=["CPUExecutionProvider"])
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.names = [*self.inputs, *(value.name for value in self.session.get_outputs())]

    @property
    def num_io_tensors(self) -> int:
        return len(self.names)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def create_runtime_config(self) -> Any:
        return RuntimeConfig()

    def create_execution_context(self, config: Any) -> Context:
        context = Context(self)
        context.kernels = getattr(config, "kernels", None)
        self.library.contexts.append(context)
        return context


class RuntimeConfig:
    """How an execution context is to be made."""

    kernels: object = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        """Memory is the host's here."""

    def create_runtime_cache(self) -> object:
        return object()

    def set_runtime_cache(self, cache: object) -> bool:
        self.kernels = cache
        return True


class Context:
    """An execution context: addresses and shapes of one profile."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.kernels: object = None
        self._driver = plan.library.driver
        self._addresses: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._profile: dict[str, Any] | None = None
        self._recorded = False

    def set_device_memory(self, address: int, size: int) -> None:
        assert size >= self._plan.device_memory_size_v2
        self._driver.memory.at(address, size)

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self._profile = self._plan.profiles[index]
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address % 256 == 0 or name not in self._plan.inputs
        self._addresses[name] = address
        return name in self._plan.names

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self._profile is not None
        assert not self._recorded, "a context whose launches were recorded gets another shape"
        sizes = {"input_ids": "tokens", "position_ids": "tokens", "cache_slots": "visible"}
        low, _, high = self._profile[sizes.get(name, "rows")]
        assert low <= shape[-1] <= high, f"{name} of {shape} is outside the profile {self._profile}"
        self._shapes[name] = shape
        return True

    def execute_async_v3(self, stream: int) -> bool:
        addresses, shapes = dict(self._addresses), dict(self._shapes)
        self._recorded = self._driver.streams[stream].recorded is not None
        self._driver.streams[stream].enqueue(lambda: self._execute(addresses, shapes))
        return True

    def _execute(self, addresses: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> None:
        memory, feeds = self._driver.memory, {}
        for name, value in self._plan.inputs.items():
            shape = shapes.get(name) or [size if isinstance(size, int) else 1 for size in value.shape]
            feeds[name] = memory.tensor(addresses[name], shape, _TYPES[value.type])
        names = [name for name in self._plan.names if name not in feeds]
        for name, result in zip(names, self._plan.session.run(names, feeds), strict=True):
            memory.tensor(addresses[name], result.shape, result.dtype.type)[:] = result
