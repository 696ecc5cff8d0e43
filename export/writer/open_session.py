"""ONNX Runtime over an open graph: texts that the model writes, and the residual stream of texts between sublayers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from via_sd.contract.graphs import (
    KEEP,
    LAST_POSITION,
    LOGIT_ROWS,
    LOGITS,
    PACKED_IDS,
    PRESENT,
    QUERY_LENGTHS,
    TO_PACKED,
    TO_PADDED,
    TOTAL_LENGTH,
    kv_place,
    step_arrays,
)
from via_sd.contract.open_stream import HIDDEN, RESUME, boundary_output
from via_sd.export.passes import Segment, branch_flags
from via_sd.export.passes.segments import KEPT, SKIPPED
from via_sd.export.writer.stepper import Stepper

Floats = NDArray[np.float32]


class OpenSession:
    """A session over the open graph in `file`, whose sublayers are `segments`."""

    def __init__(self, file: Path, segments: Sequence[Segment]) -> None:
        self._stepper = Stepper(file)
        self._segments = segments
        inputs = {value.name: value for value in self._stepper.session.get_inputs()}
        self._width = int(inputs[HIDDEN.name].shape[-1])
        self._kv = [
            (name, PRESENT.format(layer=place[0], part=place[1]), value.shape)
            for name, value in inputs.items()
            if (place := kv_place(name)) is not None
        ]

    def write_texts(self, starts: Sequence[int], length: int, seed: int = 0) -> NDArray[np.int64]:
        """Texts of `length` tokens that the model samples at temperature 1, int64 [len(starts), length].

        Args:
            starts: first token of each text.
        """
        random = np.random.default_rng(seed)
        tokens = np.array(starts, np.int64)[:, None]
        self._hold(len(starts), length)
        keep = self._keep(dict.fromkeys(range(len(self._segments)), KEPT))
        for past in range(length - 1):
            feeds = {**_single_tokens(tokens[:, -1], past), **keep, **self._stream(None)}
            logits = self._stepper.step(feeds, [LOGITS.name])[LOGITS.name][0]
            noise = random.gumbel(size=logits.shape)
            tokens = np.concatenate([tokens, (logits + noise).argmax(-1)[:, None]], axis=1)
        return tokens

    def streams(
        self,
        texts: NDArray[np.int64],
        before: Sequence[Floats] | None,
        branches: Mapping[int, str],
        boundary: int,
    ) -> list[Floats]:
        """The residual stream of each text at `boundary`, float32 [tokens, width].

        Args:
            texts: int64 [texts, tokens].
            before: the stream to start from instead of the embedding, of each text.
            branches: what runs, by sublayer; the others are skipped.
        """
        self._hold(1, texts.shape[1])
        keep = self._keep(branches)
        name = boundary_output(boundary)
        found = []
        for index, tokens in enumerate(texts):
            feeds = {**step_arrays(tokens, 0, 0), **keep}
            feeds |= self._stream(None if before is None else before[index])
            found.append(self._stepper.step(feeds, [name])[name][0])
        return found

    def _hold(self, batch: int, length: int) -> None:
        for past, present, shape in self._kv:
            self._stepper.hold(past, present, [batch, shape[1], length, shape[3]])

    def _keep(self, branches: Mapping[int, str]) -> dict[str, np.ndarray]:
        flags = [f for segment in self._segments for f in branch_flags(segment, branches.get(segment.start, SKIPPED))]
        return {KEEP.name: KEEP.array(flags)}

    def _stream(self, stream: Floats | None) -> dict[str, np.ndarray]:
        given = np.zeros((0, self._width), np.float32) if stream is None else stream
        return {RESUME.name: RESUME.array([stream is not None]), HIDDEN.name: given[None]}


def _single_tokens(tokens: NDArray[np.int64], past: int) -> dict[str, np.ndarray]:
    """What a pass over one token of each of several sequences is fed, behind `past` tokens of each."""
    rows = np.arange(len(tokens))
    index = np.stack([np.zeros_like(rows), rows], axis=-1)
    return {
        PACKED_IDS.name: PACKED_IDS.array(tokens)[None],
        QUERY_LENGTHS.name: QUERY_LENGTHS.array(np.ones_like(rows)),
        LAST_POSITION.name: LAST_POSITION.array(np.full_like(rows, past)),
        TOTAL_LENGTH.name: TOTAL_LENGTH.array(past + 1),
        TO_PADDED.name: TO_PADDED.array(index)[:, None],
        TO_PACKED.name: TO_PACKED.array(index[:, ::-1])[None],
        LOGIT_ROWS.name: LOGIT_ROWS.array(rows),
    }
