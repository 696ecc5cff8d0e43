"""The plain, pruned and routed graphs of one model, and the comparison of them bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from via_sd.export.passes import FuseGateUpPass, PrunePass, RoutePass, Substitutes, keep_vector, plan_segments
from via_sd.export.writer.variants import quantised_variants
from via_sd.masks import Mask
from via_sd.progress import no_progress

#: A prefill, several tokens at an offset, a single token.
STEPS = (40, 5, 1)
LAYERS = 4


def variants_of(model: ir.Model, masks: Sequence[Mask]) -> Substitutes:
    """What `masks` run of `model` (lowered, float32) in other precisions, as an export makes it."""
    fused = model.clone()
    FuseGateUpPass()(fused)
    return Substitutes(quantised_variants(fused, masks, {}, no_progress))


class Tiers:
    """The tiers of `model`.

    Args:
        workshop: opens graphs, see the fixture of that name.
        substitutes: for states of the masks other than keep and skip.
    """

    def __init__(
        self, model: ir.Model, masks: Sequence[Mask], workshop: Any, substitutes: Substitutes | None = None
    ) -> None:
        self.masks = masks
        self.segments = plan_segments(masks, 2 * LAYERS)
        self.graph = model.clone()
        RoutePass(self.segments, substitutes)(self.graph)
        self.routed = workshop.open(self.graph, "routed")
        self.plain = workshop.open(model, "plain")
        self.pruned = {}
        for mask in masks:
            pruned = model.clone()
            PrunePass(mask, substitutes)(pruned)
            self.pruned[mask.name] = workshop.open(pruned, mask.name)

    @property
    def all_true(self) -> list[bool]:
        return [True] * sum(len(segment.branches) - 1 for segment in self.segments)

    def check(self, tokens: Sequence[int]) -> None:
        """All true equals the plain graph and each mask its pruned one: logits and KV, in every kind of step."""
        self.compare(self.plain, self.all_true, tokens)
        for mask in self.masks:
            self.compare(self.pruned[mask.name], keep_vector(mask, self.segments), tokens)

    def compare(self, own: Any, keep: Sequence[bool], tokens: Sequence[int]) -> None:
        own.rewind()
        self.routed.rewind()
        untouched = np.random.default_rng(1)
        for name, buffer in self.routed.kv.items():
            if name not in own.kv:
                buffer[:] = untouched.standard_normal(buffer.shape)
        before = {name: buffer.copy() for name, buffer in self.routed.kv.items()}
        assert np.array_equal(own.feed_in(STEPS, tokens), self.routed.feed_in(STEPS, tokens, keep))
        for name, buffer in self.routed.kv.items():
            assert np.array_equal(buffer, own.kv[name] if name in own.kv else before[name]), name
