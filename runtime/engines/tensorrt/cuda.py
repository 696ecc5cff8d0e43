"""The few calls of the CUDA driver that engines need besides TensorRT's own: memory, copies, streams, graphs."""

from __future__ import annotations

import ctypes
import importlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from via_sd.errors import BundleError, ViaSdError


class DeviceError(ViaSdError):
    """A call to the GPU that failed."""


#: What the driver documents to leave the context inconsistent: every later call fails until the process ends.
_STICKY = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ILLEGAL_ADDRESS",
        "LAUNCH_FAILED",
        "LAUNCH_TIMEOUT",
        "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "HARDWARE_STACK_ERROR",
        "ECC_UNCORRECTABLE",
        "ASSERT",
    )
)


class DeviceLock:
    """A lock that is not reentrant, and calls that wait until nobody holds it.

    Finalisers run on any line of any thread, also of the one that holds the lock: they cannot wait for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()
        self._run_waiting()

    def when_free(self, call: Callable[[], None]) -> None:
        """Make `call` with the lock held: now, or when whoever holds it lets it go."""
        self._waiting.append(call)
        self._run_waiting()

    def _run_waiting(self) -> None:
        while self._waiting and self._lock.acquire(blocking=False):
            try:
                while self._waiting:
                    self._waiting.popleft()()
            finally:
                self._lock.release()


#: By the number of the GPU.
_LOCKS: dict[int, DeviceLock] = {}


class Cuda:
    """One GPU and its primary context, which TensorRT uses too.

    `lock`, one for all users of a GPU in the process, is held while memory is allocated or freed and while steps are
    enqueued: launches may be recorded then, by TensorRT for RTX or by us, and an allocation may spoil a recording.

    Raises:
        BundleError: no `cuda-bindings`, no driver, or no GPU.
    """

    def __init__(self, ordinal: int = 0) -> None:
        self._lost: str | None = None
        try:
            self._driver: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise BundleError(
                f"engines need the Python package cuda-bindings ({error}): pip install 'via-sd-export[tensorrt-rtx]'"
            ) from None
        try:
            self.call("cuInit", 0)
            self._device = self.call("cuDeviceGet", ordinal)
            self._context = self.call("cuDevicePrimaryCtxRetain", self._device)
        except (DeviceError, RuntimeError) as error:  # cuda-bindings raises RuntimeError where there is no driver
            raise BundleError(
                f"engines run on an NVIDIA GPU, and none can be used here ({error}); "
                "run this bundle with ONNX Runtime, or where there is one"
            ) from None
        self.lock = _LOCKS.setdefault(ordinal, DeviceLock())
        self.use()

    def use(self) -> None:
        """Make the GPU current in the calling thread.

        Raises:
            DeviceError: an earlier call failed in a way that leaves nothing of the GPU usable in this process.
        """
        if self._lost is not None:
            raise DeviceError(
                f"the GPU cannot be used in this process any more since {self._lost}: end the process and start it "
                "again; if this recurs, build the engines again"
            )
        self.call("cuCtxSetCurrent", self._context)

    @property
    def name(self) -> str:
        raw: bytes = self.call("cuDeviceGetName", 256, self._device)
        return raw.split(b"\0")[0].decode()

    @property
    def compute_capability(self) -> str:
        kind = self._driver.CUdevice_attribute
        parts = (
            self.call("cuDeviceGetAttribute", attribute, self._device)
            for attribute in (
                kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        return ".".join(str(part) for part in parts)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a driver function; its result, if it has one."""
        error, *values = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            failed = f"{name}: {error.name}"
            if error.name in _STICKY:
                self._lost = self._lost or failed
            raise DeviceError(failed)
        return values[0] if values else None


class DeviceMemory:
    """Device memory that is freed with its object."""

    def __init__(self, cuda: Cuda, size: int) -> None:
        self.size = size
        with cuda.lock:
            self.address = int(cuda.call("cuMemAlloc", size))
        weakref.finalize(self, _free, cuda, "cuMemFree", self.address)


class PinnedArray:
    """A numpy array in page-locked host memory, which the GPU copies to and from on its own."""

    def __init__(self, cuda: Cuda, shape: tuple[int, ...], dtype: Any) -> None:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        with cuda.lock:
            self.address = int(cuda.call("cuMemHostAlloc", size, 0))
        weakref.finalize(self, _free, cuda, "cuMemFreeHost", self.address)
        memory = (ctypes.c_char * size).from_address(self.address)
        self.array: np.ndarray = np.frombuffer(memory, dtype).reshape(shape)


class Stream:
    """A stream of its own, never the default one."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._stream = cuda.call("cuStreamCreate", 1)  # CU_STREAM_NON_BLOCKING
        self.handle = int(self._stream)
        weakref.finalize(self, _free, cuda, "cuStreamDestroy", self._stream)

    def to_device(self, target: int, source: int, size: int) -> None:
        self._cuda.call("cuMemcpyHtoDAsync", target, source, size, self._stream)

    def to_host(self, target: int, source: int, size: int) -> None:
        self._cuda.call("cuMemcpyDtoHAsync", target, source, size, self._stream)

    def fill(self, target: int, value: int, size: int) -> None:
        self._cuda.call("cuMemsetD8Async", target, value, size, self._stream)

    def wait(self) -> None:
        self._cuda.call("cuStreamSynchronize", self._stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` enqueues, without running it; the result enqueues all of it at once.

        Raises:
            DeviceError: it cannot be recorded; the stream takes work as before.
        """
        relaxed = importlib.import_module(
            "cuda.bindings.driver"
        ).CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._cuda.call("cuStreamBeginCapture", self._stream, relaxed)
        try:
            work()
        finally:
            graph = self._cuda.call("cuStreamEndCapture", self._stream)
        try:
            executable = self._cuda.call("cuGraphInstantiate", graph, 0)
        finally:
            self._cuda.call("cuGraphDestroy", graph)

        def launch() -> None:
            self._cuda.call("cuGraphLaunch", executable, self._stream)

        weakref.finalize(launch, _free, self._cuda, "cuGraphExecDestroy", executable)
        return launch


def load_file(cuda: Cuda, path: Path) -> DeviceMemory:
    """Bring a file into device memory as it is: one mapped read, one copy."""
    return load_array(cuda, np.memmap(path, np.uint8, mode="r"))


def load_array(cuda: Cuda, data: np.ndarray) -> DeviceMemory:
    """Bring an array into device memory; it is there when this returns, for every stream."""
    memory, stream = DeviceMemory(cuda, data.nbytes), Stream(cuda)
    stream.to_device(memory.address, data.ctypes.data, data.nbytes)
    stream.wait()
    return memory


def _free(cuda: Cuda, function: str, handle: Any) -> None:
    def free() -> None:
        # The context is gone at the end of the process, and everything in it with it.
        with suppress(DeviceError):
            cuda.use()
            cuda.call(function, handle)

    cuda.lock.when_free(free)
