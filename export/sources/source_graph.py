"""A decoder graph as another exporter wrote it: how to run it, as the reference of what is exported from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from via_sd.errors import ExportError
from via_sd.export.writer.stepper import Stepper


@dataclass(frozen=True)
class SourceGraph:
    """A decoder graph in a file, float32 in and out, whose attention updates its KV buffers in place.

    Attributes:
        file: the graph, its weights beside it.
        input_ids, attention_mask, logits: what it calls these; it may do without the mask.
        kv: names of each KV buffer, (input, output).
        kv_shape: heads and head size of a KV buffer.
        window: largest attention window of a layer whose KV buffer holds a window and no more, 0 if there is none.
    """

    file: Path
    input_ids: str
    attention_mask: str | None
    logits: str
    kv: tuple[tuple[str, str], ...]
    kv_shape: tuple[int, int]
    window: int


def run_source(source: SourceGraph, tokens: np.ndarray, chunks: Sequence[int], max_seq_len: int) -> np.ndarray:
    """Feed `tokens` to the graph in steps of `chunks` tokens; logits [tokens, vocab] of every position.

    The KV buffers hold `max_seq_len` tokens, more where the graph wants a window to fit: no position is ever evicted.

    Raises:
        ExportError: ONNX Runtime cannot load or run the graph.
    """
    heads, size = source.kv_shape
    shape = (1, heads, max(max_seq_len, source.window), size)
    rows: list[np.ndarray] = []
    past = 0
    try:
        stepper = Stepper(source.file)
        for before, after in source.kv:
            stepper.hold(before, after, shape)
        for count in chunks:
            feeds = {source.input_ids: tokens[None, past : past + count].astype(np.int64)}
            past += count
            if source.attention_mask is not None:
                feeds[source.attention_mask] = np.ones((1, past), np.int64)
            rows.append(stepper.step(feeds, [source.logits])[source.logits][0])
    except Exception as error:  # noqa: BLE001 - ONNX Runtime has no public base class of its errors
        reason = str(error).splitlines()[0]
        raise ExportError(f"ONNX Runtime cannot run {source.file}: {reason}; export it again") from None
    return np.concatenate(rows)
