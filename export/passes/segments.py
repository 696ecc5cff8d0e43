"""Segments: which parts of the decoder its tiers treat differently, and what each of them takes there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from via_sd.masks import QUANTISED_STATES, Mask

#: Branches of a segment: computed as full computes it, and left out.
KEPT, SKIPPED = "keep", "skip"


@dataclass(frozen=True)
class Segment:
    """A run of neighbouring sublayers that every mask treats alike, or the LM head, and what tiers do with it.

    Attributes:
        start, stop: units in the order of execution: 2 * layer for attention, 2 * layer + 1 for the MLP, and, behind
            the last sublayer, one for the LM head, which is a segment of its own.
        branches: what can be computed here, `keep` first, then those of `int8`, `int4`, bridges by name, and `skip`
            that some mask takes. Each branch but the last has an entry in the graph's input `keep`; the first whose
            entry is true is taken, and the last one if none is.
    """

    start: int
    stop: int
    branches: tuple[str, ...]


def plan_segments(masks: Sequence[Mask], num_sublayers: int) -> list[Segment]:
    """The runs of units that some mask does not keep, cut wherever any mask changes what it does."""
    choices = list(zip(*map(tier_branches, masks), strict=True)) if masks else [()] * (num_sublayers + 1)
    cuts = [unit for unit in range(1, num_sublayers) if choices[unit] != choices[unit - 1]]
    spans = pairwise([0, *cuts, num_sublayers, num_sublayers + 1])
    return [Segment(start, stop, _branches(choices[start])) for start, stop in spans if {*choices[start]} - {KEPT}]


def sublayer_segments(num_sublayers: int, precisions: Sequence[str] = ()) -> list[Segment]:
    """Every sublayer as a segment of its own that is kept, run in one of `precisions`, or skipped; with precisions the
    LM head too, which is not skipped: one graph that runs any mask of such states.
    """
    quantised = tuple(state for state in QUANTISED_STATES if state in precisions)
    sublayers = [Segment(unit, unit + 1, (KEPT, *quantised, SKIPPED)) for unit in range(num_sublayers)]
    head = Segment(num_sublayers, num_sublayers + 1, (KEPT, *quantised))
    return [*sublayers, head] if quantised else sublayers


def tier_branches(mask: Mask) -> list[str]:
    """The branch that `mask` takes for each unit: every sublayer in the order of execution, then the LM head.

    A bridge is taken where its run starts; the rest of the run is skipped.
    """
    branches: list[str] = [*mask.states, mask.head]
    for run in mask.bridges:
        branches[run.start : run.stop] = [bridge_name(mask, run), *[SKIPPED] * (len(run) - 1)]
    return branches


def bridge_name(mask: Mask, run: range) -> str:
    """What the bridge over the sublayers `run` is called in graphs; it is fitted to its tier."""
    return f"bridge.{mask.name}.{run.start}"


def keep_vector(mask: Mask, segments: Sequence[Segment]) -> list[bool]:
    """The `keep` input that makes the routed graph compute `mask`."""
    taken = tier_branches(mask)
    return [flag for segment in segments for flag in branch_flags(segment, taken[segment.start])]


def branch_flags(segment: Segment, branch: str) -> list[bool]:
    """The entries of `keep` by which `segment` takes `branch`."""
    index = segment.branches.index(branch)
    return [other >= index for other in range(len(segment.branches) - 1)]


def _branches(choices: Sequence[str]) -> tuple[str, ...]:
    found = {*choices}
    quantised = [state for state in QUANTISED_STATES if state in found]
    bridges = sorted(found - {KEPT, SKIPPED, *QUANTISED_STATES})
    return (KEPT, *quantised, *bridges, *([SKIPPED] if SKIPPED in found else []))
