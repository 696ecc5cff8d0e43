"""Inputs and outputs of a bundle's graphs: names, element types and shapes, as data.

Two kinds of graphs run a decoder. *float* is the element type of activations and KV; dimensions in quotes vary.

**The bundle graph** (`verifier/model.onnx` and those beside it) runs on ONNX Runtime's own operators. One graph holds
every tier: `keep` says which runs. A pass takes tokens of several sequences, as many of each as it likes. All but the
attention works on the tokens *packed*, one sequence's behind another's, so that nothing is computed for padding; the
attention works on them *padded*, as many places in each sequence's row as the longest has tokens.

| input | | |
| --- | --- | --- |
| `input_ids` | int64 [1, "tokens"] | the tokens of the pass, packed |
| `past_key_values.{layer}.{part}` | float ["batch", kv_heads, "capacity", head_dim] | KV buffers, `key` and `value` |
| `query_lengths` | int32 ["batch"] | tokens of each sequence in the pass; 0: it takes no part, its KV stays as it is |
| `last_position` | int32 ["batch"] | position of each sequence's last token; of one without tokens, any it has |
| `total_length` | int32 [] | the largest of the last positions, plus 1 |
| `to_padded` | int64 ["batch", "longest", 2] | for each place: 0 and the index of its packed token; any for padding |
| `to_packed` | int64 [1, "tokens", 2] | for each packed token: its sequence, and its place there |
| `logit_rows` | int64 ["rows"] | which of the packed tokens, 0 to tokens - 1, to compute logits for |
| `keep` | bool [flags] | which branches a routed graph takes, all true for full; absent where nothing is routed |

| output | | |
| --- | --- | --- |
| `logits` | float32 [1, "rows", vocab] | |
| `present.{layer}.{part}` | as the past | the KV buffers after the pass, meant to be bound to the past's memory |

The buffers need room for padding, though nothing is written there: of each sequence the first position of the pass plus
"longest" must not exceed "capacity".

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
from collections.abc import Iterator, Mapping
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

PACKED_IDS = GraphTensor(INPUT_IDS.name, "int64", (1, "tokens"))
QUERY_LENGTHS = GraphTensor("query_lengths", "int32", ("batch",))
LAST_POSITION = GraphTensor("last_position", "int32", ("batch",))
TOTAL_LENGTH = GraphTensor("total_length", "int32", ())
TO_PADDED = GraphTensor("to_padded", "int64", ("batch", "longest", 2))
TO_PACKED = GraphTensor("to_packed", "int64", (1, "tokens", 2))
LOGIT_ROWS = GraphTensor("logit_rows", "int64", ("rows",))
KEEP = GraphTensor("keep", "bool", ("flags",))
LOGITS = GraphTensor("logits", "float32", (1, "rows", "vocab"))

POSITION_IDS = GraphTensor("position_ids", "int64", ("batch", "tokens"))
CACHE_SLOTS = GraphTensor("cache_slots", "int64", ("visible",))
CANDIDATES = GraphTensor("candidates", "int64", ("batch", "rows"))
ROW_LOGITS = GraphTensor(LOGITS.name, "float32", ("batch", "rows", "vocab"))
#: Columns of `row_numbers`, about a row l of logits and the token v among its candidates: the first token with the
#: largest logit; sum exp(l - max l); l[v] - max l; the largest logit less the largest of the others.
ARGMAX, SUM_EXP, GAP, MARGIN = range(4)
NUMBERS_PER_ROW = 4
ROW_NUMBERS = GraphTensor("row_numbers", "float32", ("batch", "rows", NUMBERS_PER_ROW))

#: Inputs and outputs besides the KV buffers.
BUNDLE_INPUTS = (
    PACKED_IDS,
    QUERY_LENGTHS,
    LAST_POSITION,
    TOTAL_LENGTH,
    TO_PADDED,
    TO_PACKED,
    LOGIT_ROWS,
    KEEP,
)
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


def kv_bytes_per_token(kv: Mapping[str, Any]) -> int:
    """Bytes that the KV buffers of a manifest's entry `kv` hold for every token of a sequence."""
    values = int(kv["num_layers"]) * len(kv["parts"]) * int(kv["num_heads"]) * int(kv["head_dim"])
    # numpy has no bfloat16
    return values * (2 if kv["dtype"] == "bfloat16" else int(np.dtype(kv["dtype"]).itemsize))


def step_arrays(tokens: np.ndarray, past: int, num_logits: int) -> dict[str, np.ndarray]:
    """What a bundle graph is fed in a pass over one sequence, besides KV buffers and `keep`.

    Args:
        tokens: of the pass, [tokens].
        past: tokens in the KV buffers before it.
        num_logits: how many of the last tokens to compute logits for.
    """
    count = len(tokens)
    places = np.arange(count)
    end = past + count
    return {
        PACKED_IDS.name: PACKED_IDS.array(tokens)[None],
        QUERY_LENGTHS.name: QUERY_LENGTHS.array([count]),
        LAST_POSITION.name: LAST_POSITION.array([end - 1]),
        TOTAL_LENGTH.name: TOTAL_LENGTH.array(end),
        # With one sequence nothing is padded: both indices are (0, 0), (0, 1), …
        TO_PADDED.name: (index := TO_PADDED.array(np.stack([np.zeros_like(places), places], axis=-1))[None]),
        TO_PACKED.name: index,
        LOGIT_ROWS.name: LOGIT_ROWS.array(places[count - num_logits :]),
    }
