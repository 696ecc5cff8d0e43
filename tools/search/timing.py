"""Time of a decoding step under a mask, and what each state of a sublayer takes of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from via_sd.masks import Mask, StepCosts
from via_sd.tools.search.evaluator import SearchModel
from via_sd.tools.search.session import KVBuffers

_CACHED_TOKENS = 256
_TIMED_STEPS = 25

States = tuple[str, ...]


@dataclass(frozen=True)
class StepTimes:
    """Median time of one decoding step (one token), in ms, under a mask and of the full model, measured in turn."""

    slim: float
    full: float
    cached_tokens: int


def step_times(model: SearchModel, mask: Mask) -> StepTimes:
    """Time a decoding step with 256 tokens cached, or as many as the model takes."""
    session = model.session
    slim = session.states_of(mask)
    times = _median_times(model, [slim, session.everything])
    return StepTimes(times[slim], times[session.everything], _cached(model))


def measure_step_costs(model: SearchModel) -> StepCosts:
    """What states take of a decoding step, from steps in which all sublayers of a kind, or the LM head, are in one.

    The states are those of the model's search graph. Sublayers of a kind are taken to cost the same.
    """
    session = model.session
    full, count = session.everything, session.num_sublayers
    kinds = {"attention": range(0, count, 2), "mlp": range(1, count, 2), "head": range(count, count + 1)}
    settings = {
        (kind, state): tuple(state if unit in units else "keep" for unit in range(count + 1))
        for kind, units in kinds.items()
        for state in session.units[units[0]].states
    }
    times = _median_times(model, list(settings.values()))

    def saved(kind: str, state: str) -> float:
        """Share of a step that one unit of the kind saves in a state."""
        return (times[full] - times[settings[kind, state]]) / len(kinds[kind]) / times[full]

    def costs(kind: str) -> dict[str, float]:
        kept = saved(kind, "skip")
        return {state: kept - saved(kind, state) for state in session.units[kinds[kind][0]].states}

    attention, mlp = costs("attention"), costs("mlp")
    head = {state: -saved("head", state) for state in session.units[count].states}
    rest = 1 - count / 2 * (attention["keep"] + mlp["keep"])
    return StepCosts(attention, mlp, head, rest)


def _median_times(model: SearchModel, settings: Sequence[States]) -> Mapping[States, float]:
    """Median time of a decoding step in ms, for each of `settings`, which are measured in turn."""
    session = model.session
    cached = _cached(model)
    kv_buffers = KVBuffers(session, cached + 1)
    logits = np.empty((1, session.vocab_size), np.float32)
    times: dict[States, list[float]] = {states: [] for states in settings}
    for _ in range(_TIMED_STEPS):
        for states, taken in times.items():
            start = time.perf_counter()
            kv_buffers.run([0], cached, None, states, {}, logits)
            taken.append(1e3 * (time.perf_counter() - start))
    return {states: median(taken) for states, taken in times.items()}


def _cached(model: SearchModel) -> int:
    return min(_CACHED_TOKENS, model.max_seq_len - 1)
