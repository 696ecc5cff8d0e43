"""Which token of a pass lies where: the index inputs of a bundle graph, for any number of tokens of each sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from via_sd.contract.graphs import LOGIT_ROWS, QUERY_LENGTHS, TO_PACKED, TO_PADDED


class Packing:
    """Index inputs of passes over `counts` tokens per sequence, the last `rows` of each with logits.

    ONNX Runtime has kernels of its own for a single row of a product and for a single query of an attention, whose
    results differ from those of longer ones in the last bits. With `deterministic` neither is used: a lone token is
    attended to twice, the second time at the next position, where nothing lies yet; a pass that is a single row gets a
    second one, which belongs to nobody.

    Args:
        counts: tokens of each sequence; 0: it takes no part.
        rows: how many of its last tokens get logits.

    Attributes:
        tokens: in the pass, of all sequences and of nobody.
        attended: query tokens of each sequence in attention.
        inputs: index inputs by name; they stay as they are as long as counts and rows do.
    """

    def __init__(self, counts: Sequence[int], rows: Sequence[int], *, deterministic: bool = False) -> None:
        lengths = np.array(counts)
        owners = np.repeat(np.arange(len(lengths)), lengths)
        starts = np.cumsum(lengths) - lengths
        places = np.arange(len(owners)) - starts[owners]
        chosen = np.flatnonzero(places >= (lengths - np.array(rows))[owners])
        self.attended = np.where(lengths == 1, 2, lengths) if deterministic else lengths
        padded = np.zeros((len(lengths), int(self.attended.max()), 2), TO_PADDED.dtype)
        padded[owners, places, 1] = np.arange(len(owners))
        if deterministic:
            alone = np.flatnonzero(lengths == 1)
            padded[alone, 1, 1] = starts[alone]
        packed = np.stack([owners, places], axis=-1)
        self.tokens, self.rows = len(owners), len(chosen)
        if deterministic and len(owners) == 1:
            packed = np.repeat(packed, 2, axis=0)
            self.tokens = 2
        if deterministic and len(chosen) == 1:
            chosen = np.repeat(chosen, 2)
        self.logits = len(chosen)
        self.inputs = {
            QUERY_LENGTHS.name: QUERY_LENGTHS.array(self.attended),
            TO_PADDED.name: padded,
            TO_PACKED.name: TO_PACKED.array(packed)[None],
            LOGIT_ROWS.name: LOGIT_ROWS.array(chosen),
        }
