"""How the steps of a sequence are started: in execution contexts, and as CUDA graphs once their size came before."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from via_sd.contract.graphs import PORTABLE_INPUTS
from via_sd.runtime.engines.tensorrt.cuda import DeviceError, DeviceMemory, Stream

if TYPE_CHECKING:
    from via_sd.runtime.engines.tensorrt.engine import TensorRTEngine

#: Step sizes whose launches are kept as CUDA graphs, per sequence; each has an execution context of its own.
_MAX_GRAPHS = 64
#: Tier, tokens, rows and cache positions of a step.
Size = tuple[str, int, int, int]


class KernelCache:
    """What TensorRT for RTX compiled on this GPU, for every context of a model's tiers and sequences.

    Kernels are compiled when a step first needs them; without a cache, once more for each context. Held with the lock
    of the GPU. It has to outlive the contexts.
    """

    def __init__(self) -> None:
        self._cache: Any = None

    def attach(self, config: Any) -> None:
        """Let contexts that are made with `config` take kernels from here, and leave theirs."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
        if not config.set_runtime_cache(self._cache):
            raise DeviceError("TensorRT for RTX takes no runtime cache; install the version that built the engines")


class Launcher:
    """Starts steps on one stream.

    TensorRT for RTX records and replays a step's launches by itself. For TensorRT it is done here: a size that comes
    again gets a context of its own, which runs the step once, so that nothing that a new shape asks for is left to do,
    and is recorded then. A context that was recorded is never given another shape. The graphs that
    were used last are kept; a size that cannot be recorded is enqueued as before.

    Args:
        stream: where the steps run.
        addresses: where every input and output lies that is no weight.
    """

    def __init__(self, engine: TensorRTEngine, stream: Stream, addresses: Mapping[str, int]) -> None:
        self._engine, self._stream, self._addresses = engine, stream, addresses
        size = max(1, *(plan.device_memory_size_v2 for plan in engine.engines.values()))
        self._scratch = DeviceMemory(engine.cuda, size)  # of all contexts: steps of a sequence follow one another
        self._contexts: dict[tuple[str, int], Any] = {}
        #: Graphs, and the contexts they were recorded from, by size; that used last comes last.
        self._graphs: OrderedDict[Size, tuple[Callable[[], None], Any]] = OrderedDict()
        self._seen: set[Size] = set()
        self._not_recorded: set[Size] = set()
        self._kernels = engine.kernels  # attributes go in this order: the contexts first

    def launch(self, tier: str, tokens: int, rows: int, visible: int) -> None:
        """Enqueue a step of `tier` that has its inputs in place."""
        size = (tier, tokens, rows, visible)
        with self._engine.cuda.lock:
            if size in self._graphs:
                self._graphs.move_to_end(size)
                self._graphs[size][0]()
                return
            again = size in self._seen and not self._captures_itself and size not in self._not_recorded
            profile = self._engine.planner.profile(tokens, rows, visible)
            context = self._new_context(tier, profile) if again else self._context(tier, profile)
            _set_shapes(context, tokens, rows, visible)

            def enqueue() -> None:
                if not context.execute_async_v3(self._stream.handle):
                    raise DeviceError(f"a step of {tokens} tokens in tier {tier} could not be started")

            enqueue()
            if again:
                self._record(size, enqueue, context)
            self._seen.add(size)

    def _record(self, size: Size, enqueue: Callable[[], None], context: Any) -> None:
        """Keep the step that `enqueue` starts as a graph; where that fails, which changes no result, say so once."""
        try:
            self._graphs[size] = self._stream.capture(enqueue), context
        except DeviceError as error:
            self._not_recorded.add(size)
            warnings.warn(f"a step is not kept as a CUDA graph and starts more slowly: {error}", stacklevel=2)
        if len(self._graphs) > _MAX_GRAPHS:
            self._graphs.popitem(last=False)  # not running: a sequence waits for a step before it starts the next

    @property
    def _captures_itself(self) -> bool:
        return hasattr(self._engine.trt, "CudaGraphStrategy")

    def _context(self, tier: str, profile: int) -> Any:
        """The context for the sizes of a tier and profile that are not recorded."""
        if (tier, profile) not in self._contexts:
            self._contexts[tier, profile] = self._new_context(tier, profile)
        return self._contexts[tier, profile]

    def _new_context(self, tier: str, profile: int) -> Any:
        """A context of a tier and profile, with every address bound."""
        engine = self._engine
        trt, plan = engine.trt, engine.engines[tier]
        managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._captures_itself:
            config = plan.create_runtime_config()
            config.set_execution_context_allocation_strategy(managed)
            self._kernels.attach(config)
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
        weights = {name: engine.addresses[name] for name in engine.plans[tier]["weights"]}
        addresses = {**self._addresses, **weights}
        for index in range(plan.num_io_tensors):
            name = plan.get_tensor_name(index)
            if not context.set_tensor_address(name, addresses[name]):
                raise DeviceError(f"tier {tier} does not take an address for {name}")
        return context


def _set_shapes(context: Any, tokens: int, rows: int, visible: int) -> None:
    sizes: dict[int | str, int] = {"batch": 1, "tokens": tokens, "rows": rows, "visible": visible}
    for tensor in PORTABLE_INPUTS:
        shape = tuple(sizes[dim] for dim in tensor.shape)
        if not context.set_input_shape(tensor.name, shape):
            raise DeviceError(f"an engine does not take {tensor.name} of shape {shape}")
