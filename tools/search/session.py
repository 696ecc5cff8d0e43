"""ONNX Runtime over the search graph: one session that runs any mask over a piece of text."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from via_sd.contract.graphs import KEEP, LOGITS, step_arrays
from via_sd.contract.open_stream import HIDDEN, RESUME, boundary_output
from via_sd.errors import SearchError
from via_sd.masks import Mask

Floats = NDArray[np.float32]

#: Files and names of a search graph, see `search_graph`.
GRAPH_FILE = "search.onnx"
DESCRIPTION_FILE = "search.json"
#: Exit code of the process that builds one, see `graph`, for an expected failure; the reason is on stderr.
REFUSED = 2


@dataclass(frozen=True)
class Unit:
    """A sublayer, or the LM head, of a search graph: the states it can be in, `keep` first."""

    states: tuple[str, ...]

    def flags(self, state: str) -> list[bool]:
        """The entries of the graph's input `keep` that put it in `state`, as in `export.passes.branch_flags`."""
        index = self.states.index(state)
        return [other >= index for other in range(len(self.states) - 1)]


class SearchSession:
    """ONNX Runtime over a search graph.

    Args:
        directory: where `write_search_graph` wrote it.
        boundaries: what that returned.
        states: of each sublayer in the order of execution, and of the LM head.
        kv: the manifest's `kv` of this decoder.
        threads: of one run; ONNX Runtime's default if None.
    """

    def __init__(
        self,
        directory: Path,
        boundaries: Sequence[int],
        states: Sequence[Sequence[str]],
        kv: Mapping[str, Any],
        *,
        threads: int | None = None,
    ) -> None:
        try:
            import onnxruntime as ort
        except ImportError:
            raise SearchError("the search runs on ONNX Runtime: pip install 'via-sd-export[cpu]' (or [gpu])") from None
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads or 0
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        path = os.fspath(directory / GRAPH_FILE)
        self.ort = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        inputs = {value.name: value for value in self.ort.get_inputs()}
        self.num_sublayers: int = boundaries[-1]
        self.units = tuple(Unit(tuple(of)) for of in states)
        self.hidden_size: int = inputs[HIDDEN.name].shape[-1]
        self.vocab_size: int = next(o for o in self.ort.get_outputs() if o.name == LOGITS.name).shape[-1]
        self.boundaries = tuple(boundaries)
        self.kv = kv
        self._head: KVBuffers | None = None

    @property
    def everything(self) -> tuple[str, ...]:
        """The states of full: all `keep`."""
        return ("keep",) * len(self.units)

    def states_of(self, mask: Mask) -> tuple[str, ...]:
        """The state of each unit under `mask`.

        Raises:
            SearchError: a state that the graph does not have.
        """
        states = (*mask.states, mask.head)
        missing = {state for state, unit in zip(states, self.units, strict=True) if state not in unit.states}
        if missing:
            raise SearchError(
                f"the mask '{mask.name}' has sublayers, or an LM head, in state {', '.join(sorted(missing))}, and the "
                f"search graph of this model was built with {', '.join(self.units[0].states)}"
            )
        return states

    def flags(self, states: Sequence[str]) -> list[bool]:
        """The graph's input `keep` that puts each unit in its state."""
        return [flag for unit, state in zip(self.units, states, strict=True) for flag in unit.flags(state)]

    def head(self, hidden: Floats, states: Sequence[str], out: Floats) -> None:
        """Logits of the final `hidden` [rows, hidden size] into `out` [rows, vocab], by the LM head as in `states`."""
        if self._head is None:
            self._head = KVBuffers(self, 1)
        self._head.run([], 0, hidden, (*["skip"] * self.num_sublayers, states[-1]), {}, out)

    def greedy(self, prompt: Sequence[int], limit: int, eos: Collection[int]) -> list[int]:
        """The full model's greedy continuation of `prompt`: at most `limit` tokens, without the one in `eos` that
        ended it.
        """
        kv_buffers = KVBuffers(self, len(prompt) + limit)
        logits = np.empty((1, self.vocab_size), np.float32)
        answer: list[int] = []
        fed: Sequence[int] = prompt
        past = 0
        while len(answer) < limit:
            kv_buffers.run(fed, past, None, self.everything, {}, logits)
            past += len(fed)
            token = int(logits[0].argmax())
            if token in eos:
                break
            answer.append(token)
            fed = [token]
        return answer


class KVBuffers:
    """KV buffers of one sequence of at most `capacity` tokens, bound in place."""

    def __init__(self, session: SearchSession, capacity: int) -> None:
        kv = session.kv
        self._session = session
        shape = (kv["num_layers"], len(kv["parts"]), 1, kv["num_heads"], capacity, kv["head_dim"])
        #: [layer, part, 1, heads, capacity, head dim]
        self.buffers = np.zeros(shape, kv["dtype"])
        self._binding = session.ort.io_binding()
        self._present: dict[str, NDArray[Any]] = {}
        for layer in range(kv["num_layers"]):
            for index, part in enumerate(kv["parts"]):
                buffer = self.buffers[layer, index]
                self._bind(kv["past"].format(layer=layer, part=part), buffer)
                self._present[kv["present"].format(layer=layer, part=part)] = buffer

    def run(
        self,
        tokens: Sequence[int],
        past: int,
        hidden: Floats | None,
        states: Sequence[str],
        streams: Mapping[int, Floats],
        logits: Floats | None = None,
    ) -> None:
        """Run the model with its units in `states` over one piece of text.

        Args:
            tokens: the piece, unless `hidden` is given.
            past: tokens before it, whose KV the buffers hold.
            hidden: the stream to start from instead, [length, hidden size].
            states: of each unit.
            streams: where the stream before sublayer b goes, by boundary b, each [length, hidden size].
            logits: where the logits of the last rows go, [rows, vocab].
        """
        session, binding = self._session, self._binding
        length = len(tokens) if hidden is None else len(hidden)
        given = np.zeros((0, session.hidden_size), np.float32) if hidden is None else hidden
        fed = np.array(tokens) if hidden is None else np.zeros(length)
        feeds = {
            **step_arrays(fed, past, 0 if logits is None else len(logits)),
            KEEP.name: KEEP.array(session.flags(states)),
            RESUME.name: RESUME.array([hidden is not None]),
            HIDDEN.name: given[None],
        }
        for name, array in feeds.items():
            assert isinstance(array, np.ndarray)
            self._bind(name, array)
        # What an earlier run was asked for must not be written again: its arrays belong to others by now.
        binding.clear_binding_outputs()
        outputs = {**self._present, **{boundary_output(b): stream[None] for b, stream in streams.items()}}
        if logits is not None:
            outputs[LOGITS.name] = logits[None]
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        session.ort.run_with_iobinding(binding)

    def _bind(self, name: str, array: NDArray[Any]) -> None:
        self._binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
