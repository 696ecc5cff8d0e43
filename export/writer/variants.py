"""What slim tiers run instead of full's sublayers: quantised variants of the decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from via_sd.export.passes import FuseGateUpPass, QuantizePass, find_sublayers
from via_sd.export.passes.step_inputs import find_head
from via_sd.export.writer.input_energy import measured_energy
from via_sd.masks import QUANTISED_STATES, Mask, QuantisedState
from via_sd.progress import Progress, no_progress


def quantised_copies(
    model: ir.Model, states: Sequence[QuantisedState], num_layers: int, vocab_size: int, max_seq_len: int
) -> dict[str, ir.Model]:
    """The lowered decoder `model`, which is left as it is, with all its weights in each of `states`, bit for bit as an
    export quantises them.
    """
    fused: ir.Model = model.clone()
    FuseGateUpPass()(fused)
    energy = measured_energy(fused, vocab_size, max_seq_len) if "int4" in states else {}
    whole = Mask.from_layers([True] * num_layers)
    return quantised_variants(fused, [whole.in_precision(state) for state in states], energy, no_progress)


def quantised_variants(
    fused: ir.Model, masks: Sequence[Mask], energy: Mapping[str, np.ndarray], progress: Progress
) -> dict[str, ir.Model]:
    """A copy of the decoder in each precision that a mask names; what no mask runs in it stays in float32.

    Args:
        fused: what a quantised decoder is made from: lowered, gate and up projections fused.
        energy: see `QuantizePass`.
    """
    return {
        state: _variant(fused, state, masks, energy, progress)
        for state in QUANTISED_STATES
        if any(state in mask.precisions for mask in masks)
    }


def _variant(
    fused: ir.Model, state: str, masks: Sequence[Mask], energy: Mapping[str, np.ndarray], progress: Progress
) -> ir.Model:
    variant: ir.Model = fused.clone()
    wanted = {
        node
        for index, sublayer in enumerate(find_sublayers(variant.graph))
        if any(mask.states[index] == state for mask in masks)
        for node in sublayer.nodes
    }
    if any(mask.head == state for mask in masks):
        wanted.add(find_head(variant.graph))
    QuantizePass(int(state.removeprefix("int")), energy=energy, only=wanted, progress=progress)(variant)
    return variant
