"""Inputs and outputs of an *open* graph besides those of a bundle graph: the residual stream, to be read and replaced.

In an open graph every sublayer is a segment of its own that can be skipped, so that what computes a tier from the
middle on starts from a stream that an earlier run left: everything before is skipped, and `hidden` takes the place of
the embedding.
"""

from __future__ import annotations

from via_sd.contract.graphs import GraphTensor

#: Whether the stream starts as `hidden` instead of the embedding of `input_ids`.
RESUME = GraphTensor("resume", "bool", (1,))
HIDDEN = GraphTensor("hidden", "float32", (1, "resumed", "width"))


def boundary_output(boundary: int) -> str:
    """Name of the output that holds the stream before sublayer `boundary`, float32 [1, tokens, width]."""
    return f"{HIDDEN.name}_{boundary}"
