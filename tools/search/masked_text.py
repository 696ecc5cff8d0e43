"""A model that runs under any mask over a scoring text, with what candidates have in common run once.

The streams at regular boundaries of recent candidates are kept, and a candidate starts behind the last boundary up to
which one of them had every sublayer in the state it has. The full model's are kept for good, so that a candidate never
computes the layers before its first skip; one that differs little from a recent candidate shares more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from via_sd.masks import Mask
from via_sd.tools.search.session import Floats, KVBuffers, SearchSession
from via_sd.tools.search.text import ScoringText

_LOGITS_ELEMENTS = 12_500_000  # of one block: 50 MB


class MaskedText:
    """A `masks.MaskedModel` on ONNX Runtime.

    The scored positions are those at which a scored token is fed. A prompt is always read by the full model, as it is
    at run time, and slim reads its own KV of the scored tokens; see `lagging` for the other extreme.

    Args:
        session: what runs the graph.
        texts: the scoring texts.
        cache_bytes: memory for streams of recent candidates, on top of the full model's own.
    """

    def __init__(self, session: SearchSession, texts: Sequence[ScoringText], *, cache_bytes: int) -> None:
        self._setup(session, [_Sequence(session, text) for text in texts], cache_bytes, None)

    def _setup(self, session: SearchSession, sequences: list[_Sequence], cache_bytes: int, max_lag: int | None) -> None:
        self._session = session
        self._sequences = sequences
        self._max_lag = max_lag
        self.num_layers = session.num_sublayers // 2
        self.vocab_size = session.vocab_size
        self.num_positions = sum(sequence.scored for sequence in sequences)
        self._rows = max(1, min(256, _LOGITS_ELEMENTS // session.vocab_size))
        self._block: Floats = np.empty((self._rows, session.vocab_size), np.float32)
        self._streams = _Streams(session.boundaries, cache_bytes)
        #: Sublayer runs asked for and done: what sharing saved.
        self.sublayers_asked = self.sublayers_run = 0

    def lagging(self, max_lag: int) -> MaskedText:
        """The same texts, with full's KV up to `max_lag` tokens back: as far as the runtime lets slim run ahead of
        full, so that what happens in practice lies between the two.
        """
        for sequence in self._sequences:
            sequence.keep_full_kv()
        other = MaskedText.__new__(MaskedText)
        other._setup(self._session, self._sequences, 0, max_lag)
        return other

    def logits(self, mask: Mask) -> Iterator[Floats]:
        """See `MaskedModel.logits`."""
        states = self._session.states_of(mask)
        hidden = self._final_stream(states)
        for start in range(0, len(hidden), self._rows):
            rows = hidden[start : start + self._rows]
            block = self._block[: len(rows)]
            self._session.head(rows, states, block)
            yield block

    def _final_stream(self, states: tuple[str, ...]) -> Floats:
        """The stream behind the last sublayer, [scored positions, hidden size], with the units in `states`."""
        start, entry = self._streams.longest_shared(states)
        sublayers = states[: self._session.num_sublayers]
        self.sublayers_asked += sum(state != "skip" for state in sublayers)
        self.sublayers_run += sum(state != "skip" for state in sublayers[start:])
        made: dict[int, Floats] = {
            boundary: np.empty((self.num_positions, self._session.hidden_size), np.float32)
            for boundary in self._session.boundaries
            if boundary > start
        }
        first = 0
        for sequence in self._sequences:
            rows = slice(first, first + sequence.scored)
            given = None if entry is None else entry[rows]
            streams = {boundary: stream[rows] for boundary, stream in made.items()}
            sequence.run(("skip",) * start + states[start:], given, streams, self._max_lag)
            first = rows.stop
        final = made.pop(self._session.boundaries[-1])
        self._streams.keep(states, made, for_good=set(sublayers) == {"keep"})
        return final


class _Sequence:
    """One scoring text and its KV buffers, in which the prompt's KV is the full model's."""

    def __init__(self, session: SearchSession, text: ScoringText) -> None:
        self._text = text
        self._everything = session.everything
        self._kv = KVBuffers(session, len(text.tokens))
        self._full_kv: NDArray[np.generic] | None = None
        if text.start:
            self._kv.run(text.tokens[: text.start], 0, None, self._everything, {})

    @property
    def scored(self) -> int:
        return self._text.scored

    def keep_full_kv(self) -> None:
        """Run the full model and set its KV of the scored tokens aside."""
        if self._full_kv is None:
            self.run(self._everything, None, {}, None)
            self._full_kv = self._kv.buffers[..., self._text.start :, :].copy()

    def run(
        self, states: Sequence[str], entry: Floats | None, streams: Mapping[int, Floats], max_lag: int | None
    ) -> None:
        """Run the units in `states` over the scored tokens; arguments as for `KVBuffers.run`."""
        tokens, start, end = self._text.tokens, self._text.start, len(self._text.tokens)
        step = end - start if max_lag is None else max_lag
        if max_lag is not None:
            assert self._full_kv is not None
            self._kv.buffers[..., start:, :] = self._full_kv
        # Last piece first: each reads KV that no earlier run has overwritten.
        for first in reversed(range(start, end, step)):
            piece = slice(first, min(first + step, end))
            rows = slice(piece.start - start, piece.stop - start)
            given = None if entry is None else entry[rows]
            self._kv.run(tokens[piece], first, given, states, {b: s[rows] for b, s in streams.items()})


class _Streams:
    """Streams at boundaries, found again by the states that sublayers were in up to there."""

    def __init__(self, boundaries: Sequence[int], limit: int) -> None:
        self._boundaries = boundaries
        self._limit = limit
        self._size = 0
        self._full: dict[tuple[str, ...], Floats] = {}
        self._recent: OrderedDict[tuple[str, ...], Floats] = OrderedDict()

    def longest_shared(self, states: tuple[str, ...]) -> tuple[int, Floats | None]:
        """The last boundary whose stream under `states` is known, and that stream; (0, None) if there is none."""
        for boundary in reversed(self._boundaries[:-1]):
            run = states[:boundary]
            if run in self._full:
                return boundary, self._full[run]
            if run in self._recent:
                self._recent.move_to_end(run)
                return boundary, self._recent[run]
        return 0, None

    def keep(self, states: tuple[str, ...], streams: Mapping[int, Floats], *, for_good: bool) -> None:
        """Keep `streams`, made under `states`, by boundary."""
        for boundary, stream in streams.items():
            run = states[:boundary]
            if for_good:
                self._full[run] = stream
            elif run not in self._full and run not in self._recent:
                self._recent[run] = stream
                self._size += stream.nbytes
        while self._size > self._limit:
            self._size -= self._recent.popitem(last=False)[1].nbytes
