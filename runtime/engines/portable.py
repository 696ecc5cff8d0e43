"""The portable graphs beside the engines, run by ONNX Runtime on any of its providers, buffers on the device.

This is the way for a GPU that TensorRT for RTX has no kernels for, and for comparing engines with. One copy of the
weights serves every session; KV buffers are bound as input and output, so that a step copies tokens in and a few
numbers per position out. Logits stay on the device until somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from via_sd.contract.graphs import (
    CACHE_SLOTS,
    CANDIDATES,
    DRAFTER,
    FULL,
    INPUT_IDS,
    LOGIT_ROWS,
    POSITION_IDS,
    ROW_LOGITS,
    ROW_NUMBERS,
    VERIFIER,
)
from via_sd.contract.manifest import Bundle
from via_sd.errors import BundleError
from via_sd.runtime.engines.device_rows import device_rows
from via_sd.runtime.engines.engine_files import EngineFiles, read_engine_files
from via_sd.runtime.engines.ort import onnxruntime, session_options
from via_sd.runtime.engines.protocol import OneSequencePerPass
from via_sd.runtime.engines.providers import PROVIDERS, Provider, open_on, prepare
from via_sd.runtime.engines.rows import Row
from via_sd.runtime.engines.steps import Step, StepPlanner

_DTYPES = {"float32": np.float32, "float16": np.float16}


def load_graphs(
    bundle: Bundle,
    target: str,
    provider: str,
    *,
    ordinal: int = 0,
    threads: int | None = None,
    verify: bool = True,
) -> tuple[GraphEngine, GraphEngine | None]:
    """The portable graphs that `bundle` has for `target`, in ONNX Runtime: the verifier's, and a model drafter's.

    Args:
        target: whose folder the graphs are taken from, `tensorrt-rtx` or `tensorrt`.
        provider: one of `PROVIDERS`.
        ordinal: which GPU, if it is one.
        threads: threads of one pass on a CPU; the number of physical cores if None.
        verify: compare the hash of every file with the manifest.

    Raises:
        BundleError: no graphs, damaged ones, a provider this ONNX Runtime has not, or bfloat16 weights.
    """
    if provider not in PROVIDERS:
        raise BundleError(f"provider {provider!r} is not known; providers are {', '.join(PROVIDERS)}")
    files = read_engine_files(bundle, target, trust=True, verify=verify)  # graphs are data, and no plan is run
    if (dtype := files.manifest["kv"][VERIFIER]["dtype"]) not in _DTYPES:
        raise BundleError(
            f"the graphs in {files.folder} are {dtype}, for which numpy has no type; build them with --dtype fp16"
        )
    chosen = PROVIDERS[provider]
    prepare(chosen, ordinal)
    data = np.memmap(files.folder / files.manifest["weights"]["file"], np.uint8, mode="r")
    weights = data if chosen.shares_weights else None

    def engine(model: str) -> GraphEngine:
        return GraphEngine(files, model, chosen, ordinal, weights, threads)

    return engine(VERIFIER), engine(DRAFTER) if files.engines_of(DRAFTER) else None


class GraphEngine(OneSequencePerPass):
    """One model's portable graphs, a session each; see `Engine`.

    Args:
        model: `verifier` or `drafter`.
        provider: what runs the graphs.
        ordinal: which GPU its buffers are on.
        weights: the weights file; None if sessions load it themselves.
        threads: intra-op threads; ONNX Runtime's default if None.
    """

    def __init__(
        self,
        files: EngineFiles,
        model: str,
        provider: Provider,
        ordinal: int,
        weights: np.ndarray | None,
        threads: int | None,
    ) -> None:
        manifest = files.manifest
        self.device, self.ordinal = provider.device, ordinal
        self.kv: dict[str, Any] = manifest["kv"][model]
        self.vocab_size = int(manifest["vocab_size"][model])
        self.max_seq_len = int(manifest["max_seq_len"][model])
        self.planner = StepPlanner(files.request["profiles"][model], self.max_seq_len)
        self.prefill_chunk = self.planner.max_tokens
        self._weights = {} if weights is None else self._on_device(manifest["weights"]["tensors"][model], weights)
        self.sessions: dict[str, Any] = {}
        for name in files.engines_of(model):
            options = session_options(threads)
            for weight in manifest["engines"][name]["weights"] if self._weights else ():
                options.add_initializer(weight, self._weights[weight])
            graph = files.folder / manifest["engines"][name]["graph"]
            self.sessions[FULL if model == DRAFTER else name] = open_on(graph, options, provider, ordinal)
        self.tiers = tuple(self.sessions)

    def new_buffers(self) -> GraphKVBuffers:
        return GraphKVBuffers(self)

    def value(self, array: np.ndarray) -> Any:
        """`array` where the provider's buffers are."""
        return onnxruntime().OrtValue.ortvalue_from_numpy(array, self.device, self.ordinal)

    def _on_device(self, tensors: Sequence[dict[str, Any]], data: np.ndarray) -> dict[str, Any]:
        """The weights where the provider's buffers are, as a session takes initializers.

        ONNX Runtime takes an initializer only over memory that somebody else owns, and a value that it copied to a
        device owns its memory: sessions get views of such values, which are kept as long as the engine.
        """
        self._owners = {
            tensor["name"]: self.value(
                data[tensor["offset"] : tensor["offset"] + tensor["size"]]
                .view(_DTYPES[tensor["dtype"]])
                .reshape(tensor["shape"])
            )
            for tensor in tensors
        }
        view = onnxruntime().OrtValue.from_dlpack
        return {name: view(value) for name, value in self._owners.items()}


class GraphKVBuffers:
    """KV buffers of one sequence, and a binding per tier over them; see `KVBuffers`."""

    def __init__(self, engine: GraphEngine) -> None:
        self._engine = engine
        kv = engine.kv
        shape, dtype = (1, kv["num_heads"], engine.max_seq_len, kv["head_dim"]), _DTYPES[kv["dtype"]]
        self._kv = {
            (layer, part): engine.value(np.zeros(shape, dtype))
            for layer in range(kv["num_layers"])
            for part in kv["parts"]
        }
        self._bindings: dict[str, Any] = {}

    def forward(self, tier: str, tokens: Sequence[int], past: int, rows: int) -> list[Row]:
        """See `KVBuffers.forward`."""
        found: list[Row] = []
        for step in self._engine.planner.cut(len(tokens), rows):
            found += self._step(tier, tokens, past, step)
        return found

    def keys_values(self, layer: int) -> np.ndarray:
        """See `ReadableKVBuffers.keys_values`."""
        return np.stack([self._kv[layer, part].numpy()[0].astype(np.float32) for part in self._engine.kv["parts"]])

    def _step(self, tier: str, tokens: Sequence[int], past: int, step: Step) -> Sequence[Row]:
        binding, first, end = self._binding(tier), past + step.start, past + step.start + step.count
        candidates = step.candidates(tokens)
        for tensor, values in (
            (INPUT_IDS, [tokens[step.start : step.start + step.count]]),
            (POSITION_IDS, np.arange(first, end)[None]),
            (CACHE_SLOTS, np.arange(self._engine.planner.visible(end))),
            (LOGIT_ROWS, step.rows),
            (CANDIDATES, [candidates]),
        ):
            binding.bind_cpu_input(tensor.name, tensor.array(values))
        self._bind_rows(binding)  # anew: their number differs from step to step
        self._engine.sessions[tier].run_with_iobinding(binding)
        if not step.keep:
            return []
        numbers, logits = binding.get_outputs()[:2]
        on_host = cache(lambda: logits.numpy()[0])  # all rows at once, when the first is asked for
        return device_rows(numbers.numpy()[0], candidates, lambda row: on_host()[row])

    def _bind_rows(self, binding: Any) -> None:
        binding.bind_output(ROW_NUMBERS.name, "cpu")
        binding.bind_output(ROW_LOGITS.name, self._engine.device, self._engine.ordinal)

    def _binding(self, tier: str) -> Any:
        if tier not in self._bindings:
            session, kv = self._engine.sessions[tier], self._engine.kv
            binding = session.io_binding()
            self._bind_rows(binding)  # first, so that they stay the first of the outputs
            names = {value.name for value in session.get_inputs()}
            for (layer, part), buffer in self._kv.items():
                past = kv["past"].format(layer=layer, part=part)
                if past in names:  # a layer this tier skips has no buffer in its graph
                    binding.bind_ortvalue_input(past, buffer)
                    binding.bind_ortvalue_output(kv["present"].format(layer=layer, part=part), buffer)
            self._bindings[tier] = binding
        return self._bindings[tier]
