"""Inputs and outputs of a bundle's graphs: names, element types and shapes, as data.

Two kinds of graphs run a decoder. *float* is the element type of activations and KV; dimensions in quotes vary.

**The bundle graph** (`verifier/model.onnx` and those beside it) runs on ONNX Runtime's own operators. One graph holds
every tier: `keep` says which runs.

| input | | |
| --- | --- | --- |
| `input_ids` | int64 ["batch", "tokens"] | the tokens of the step |
| `past_key_values.{layer}.{part}` | float ["batch", kv_heads, "past", head_dim] | KV buffers, `key` and `value` |
| `last_position` | int32 ["batch"] | index of the step's last token in its sequence |
| `total_length` | int32 [] | tokens in the KV buffers after the step |
| `num_logits` | int64 [1] | rows of logits to compute, those of the last tokens |
| `keep` | bool [flags] | which branches a routed graph takes, all true for full; absent where nothing is routed |

| output | | |
| --- | --- | --- |
| `logits` | float32 ["batch", "num_logits", vocab] | of the last `num_logits` tokens |
| `present.{layer}.{part}` | as the past | the KV buffers after the step, meant to be bound to the past's memory |

**The portable graph** (`engines/TARGET/TIER.onnx`) has standard operators alone, one graph for every tier. *S* is
`max_seq_len`.

| input | | |
| --- | --- | --- |
| `input_ids` | int64 ["batch", "tokens"] | the tokens of the step |
| `position_ids` | int64 ["batch", "tokens"] | consecutive per sequence; the first says where the step is written |
| `cache_slots` | int64 ["visible"] | 0, 1, …: how much of the KV buffers the step reads: beyond its last position |
| `past_key_values.{layer}.{part}` | float ["batch", kv_heads, S, head_dim] | of every layer that runs its attention |
| `logit_rows` | int64 ["rows"] | which of the step's tokens, 0 to tokens - 1, to compute logits for |
| `candidates` | int64 ["batch", "rows"] | for each of these a token that its numbers are to be about too |

| output | | |
| --- | --- | --- |
| `logits` | float32 ["batch", "rows", vocab] | |
| `row_numbers` | float32 ["batch", "rows", 4] | per row: argmax, sum of exponentials, gap of the candidate, margin |
| `present.{layer}.{part}` | as the past | the KV buffers after the step, bound to the past's memory |

Layers keep the index they have in the full model, whatever a tier leaves out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

#: The tier that runs the whole model.
FULL = "full"
#: The models of a bundle.
VERIFIER, DRAFTER = "verifier", "drafter"


@dataclass(frozen=True)
class GraphTensor:
    """An input or an output of a graph.

    Attributes:
        dtype: element type, as numpy calls it.
        shape: a number is a size; a name stands for a size that varies, or that differs between models.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def array(self, values: Any) -> np.ndarray:
        """`values` in the element type of this tensor."""
        return np.array(values, self.dtype)


INPUT_IDS = GraphTensor("input_ids", "int64", ("batch", "tokens"))

LAST_POSITION = GraphTensor("last_position", "int32", ("batch",))
TOTAL_LENGTH = GraphTensor("total_length", "int32", ())
NUM_LOGITS = GraphTensor("num_logits", "int64", (1,))
KEEP = GraphTensor("keep", "bool", ("flags",))
LOGITS = GraphTensor("logits", "float32", ("batch", "num_logits", "vocab"))

POSITION_IDS = GraphTensor("position_ids", "int64", ("batch", "tokens"))
CACHE_SLOTS = GraphTensor("cache_slots", "int64", ("visible",))
LOGIT_ROWS = GraphTensor("logit_rows", "int64", ("rows",))
CANDIDATES = GraphTensor("candidates", "int64", ("batch", "rows"))
ROW_LOGITS = GraphTensor(LOGITS.name, "float32", ("batch", "rows", "vocab"))
#: Columns of `row_numbers`, about a row l of logits and the token v among its candidates: the first token with the
#: largest logit; sum exp(l - max l); l[v] - max l; the largest logit less the largest of the others.
ARGMAX, SUM_EXP, GAP, MARGIN = range(4)
NUMBERS_PER_ROW = 4
ROW_NUMBERS = GraphTensor("row_numbers", "float32", ("batch", "rows", NUMBERS_PER_ROW))

#: Inputs and outputs besides the KV buffers.
BUNDLE_INPUTS = (INPUT_IDS, LAST_POSITION, TOTAL_LENGTH, NUM_LOGITS, KEEP)
BUNDLE_OUTPUTS = (LOGITS,)
PORTABLE_INPUTS = (INPUT_IDS, POSITION_IDS, CACHE_SLOTS, LOGIT_ROWS, CANDIDATES)
PORTABLE_OUTPUTS = (ROW_LOGITS, ROW_NUMBERS)

#: Names of the KV buffers before and after a step, and what `{part}` may be.
PAST = "past_key_values.{layer}.{part}"
PRESENT = "present.{layer}.{part}"
PARTS = ("key", "value")
_PAST = re.compile(PAST.replace(".", r"\.").format(layer=r"(\d+)", part=f"({'|'.join(PARTS)})"))


def kv_names(layer: int) -> Iterator[tuple[str, str]]:
    """Input and output of each KV buffer of `layer`, as `PARTS` has them."""
    for part in PARTS:
        yield PAST.format(layer=layer, part=part), PRESENT.format(layer=layer, part=part)


def kv_place(name: str | None) -> tuple[int, str] | None:
    """Layer and part of the KV buffer that is the input `name`; None if it is no KV buffer."""
    match = _PAST.fullmatch(name or "")
    return None if match is None else (int(match.group(1)), match.group(2))


def step_arrays(tokens: np.ndarray, past: int, num_logits: int) -> dict[str, np.ndarray]:
    """What a bundle graph is fed in a step, besides KV buffers and `keep`.

    Args:
        tokens: of the step, [tokens].
        past: tokens in the KV buffers before it.
    """
    end = past + len(tokens)
    return {
        INPUT_IDS.name: INPUT_IDS.array(tokens)[None],
        LAST_POSITION.name: LAST_POSITION.array([end - 1]),
        TOTAL_LENGTH.name: TOTAL_LENGTH.array(end),
        NUM_LOGITS.name: NUM_LOGITS.array([num_logits]),
    }
