"""An engine whose tiers are other Triton models: for the repository layout that keeps them apart.

KV lives here between steps, one array per layer and part with as many rows as have been written, and travels to a
tier's model and back with every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from via_sd.contract.graphs import FULL, KEEP, LOGITS, TOTAL_LENGTH, step_arrays
from via_sd.masks import parse_mask
from via_sd.runtime.engines.protocol import OneSequencePerPass
from via_sd.runtime.engines.rows import HostRow

#: Runs a model: its name, its inputs, and the names of the outputs that are wanted.
Infer = Callable[[str, Mapping[str, np.ndarray], Sequence[str]], Mapping[str, np.ndarray]]


class TritonEngine(OneSequencePerPass):
    """Runs the tiers of one decoder as Triton models (see `via_sd.runtime.engines.protocol.Engine`).

    Args:
        models: the Triton model of every tier, `full` among them.
        description: the bundle's entry for the decoder (`kv`, `vocab_size`, and `tiers` if it has several).
        max_seq_len: most tokens a sequence may have.
        infer: calls a model.
    """

    def __init__(
        self, models: Mapping[str, str], description: Mapping[str, Any], max_seq_len: int, infer: Infer
    ) -> None:
        self.max_seq_len = max_seq_len
        self.prefill_chunk = 512  # KV travels with every step: better few of them
        self.vocab_size = int(description["vocab_size"])
        self.kv: Mapping[str, Any] = description["kv"]
        # The graph of `full` holds every tier and wants to be told which; a pruned tier's graph is that tier alone.
        tiers = description.get("tiers") or {FULL: {KEEP.name: []}}
        self.keep = KEEP.array(tiers[FULL][KEEP.name])
        self.tiers = tuple(tier for tier in tiers if tier in models)
        self.models = dict(models)
        self.layers = {tier: _kept_layers(tiers[tier], self.kv["num_layers"]) for tier in self.tiers}
        self.infer = infer

    def new_buffers(self) -> TritonKVBuffers:
        """KV of one sequence, empty."""
        return TritonKVBuffers(self)


class TritonKVBuffers:
    """KV of one sequence (see `via_sd.runtime.engines.protocol.KVBuffers`)."""

    def __init__(self, engine: TritonEngine) -> None:
        self._engine = engine
        kv = engine.kv
        empty = np.zeros((1, kv["num_heads"], 0, kv["head_dim"]), dtype=kv["dtype"])
        self._cache = {(layer, part): empty for layer in range(kv["num_layers"]) for part in kv["parts"]}

    def forward(self, tier: str, tokens: Sequence[int], past: int, rows: int) -> list[HostRow]:
        """See `KVBuffers.forward`."""
        engine, kv = self._engine, self._engine.kv
        inputs = step_arrays(np.array(tokens), past, rows)
        inputs[TOTAL_LENGTH.name] = inputs[TOTAL_LENGTH.name][None]  # Triton refuses a scalar input
        if tier == FULL and engine.keep.size:
            inputs[KEEP.name] = engine.keep
        caches = [key for key in self._cache if key[0] in engine.layers[tier]]
        for layer, part in caches:
            # With room for the new tokens the attention operator takes it for a buffer to fill, whatever `past` is;
            # and no tensor is ever without elements.
            buffer = np.zeros((1, kv["num_heads"], past + len(tokens), kv["head_dim"]), dtype=kv["dtype"])
            buffer[:, :, :past] = self._cache[layer, part][:, :, :past]
            inputs[kv["past"].format(layer=layer, part=part)] = buffer
        presents = {key: kv["present"].format(layer=key[0], part=key[1]) for key in caches}
        outputs = engine.infer(engine.models[tier], inputs, [LOGITS.name, *presents.values()])
        for key, name in presents.items():
            self._cache[key] = outputs[name]
        return [HostRow(row) for row in outputs[LOGITS.name][0]]


def _kept_layers(tier: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Layers whose attention `tier` runs: those whose KV its graph takes and gives."""
    runs = parse_mask(tier["mask"]).keep_attention if "mask" in tier else (True,) * num_layers
    return frozenset(layer for layer in range(num_layers) if runs[layer])
