"""Predict the speed of a mode: run its own code over an engine that replays what the tiers said, and add up latencies.

In an exact greedy mode the text is the full verifier's, whatever is drafted. What every tier says along that text and
what its passes cost decide which passes a mode makes and how long it takes. Both are recorded once; every mode and
setting then runs without a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from via_sd.contract.graphs import FULL
from via_sd.runtime.decoding.cost_model import StepCost
from via_sd.runtime.engines.protocol import Engine, OneSequencePerPass

#: Tokens a lower tier reads ahead of the full verifier's KV while it is recorded: about a block's length.
_BLOCK = 8


@dataclass(frozen=True)
class Opinion:
    """What a tier's row says about the next token; it is a `Row` without logits.

    Attributes:
        token: the likeliest.
        lead: see `Row.margin`.
        mass: see `Row.sum_exp`.
    """

    token: int
    lead: float
    mass: float

    def argmax(self) -> int:
        return self.token

    def sum_exp(self) -> float:
        return self.mass

    def margin(self) -> float:
        return self.lead

    def gap(self, token: int) -> float:
        """0 for the likeliest token. Any other lies at least the margin below it, and counts as just that."""
        return 0.0 if token == self.token else -self.lead

    def is_finite(self) -> bool:
        return True

    @property
    def logits(self) -> np.ndarray:
        raise NotImplementedError("a replay has no logits: it serves greedy decoding without penalties")


@dataclass(frozen=True)
class Trace:
    """A prompt, the full verifier's greedy text behind it, and each lower tier's opinion on every token of the text."""

    prompt: tuple[int, ...]
    text: tuple[int, ...]
    opinions: Mapping[str, tuple[Opinion, ...]]


def record(engine: Engine, prompt: Sequence[int], text: Sequence[int]) -> Trace:
    """What the tiers of `engine` say along `text`, the full verifier's answer to `prompt`.

    A lower tier reads the full verifier's KV up to a few tokens back, as it does in `cascade`.
    """
    buffers = engine.new_buffers()
    top, *lower = engine.tiers
    context = list(prompt)
    for start in range(0, len(context), engine.prefill_chunk):
        buffers.forward(top, context[start : start + engine.prefill_chunk], start, 1)
    opinions: dict[str, list[Opinion]] = {tier: [] for tier in lower}
    # The row behind a token is an opinion on the next one, so the last token of the prompt is fed again.
    fed, first = [context[-1], *text[:-1]], len(context) - 1
    for start in range(0, len(fed), _BLOCK):
        block = fed[start : start + _BLOCK]
        for tier in lower:
            rows = buffers.forward(tier, block, first + start, len(block))
            opinions[tier] += [Opinion(row.argmax(), row.margin(), row.sum_exp()) for row in rows]
        buffers.forward(top, block, first + start, 1)
    return Trace(tuple(prompt), tuple(text), {tier: tuple(found) for tier, found in opinions.items()})


class ReplayEngine(OneSequencePerPass):
    """An `Engine` that says what was recorded, and counts the time that its passes would take.

    Args:
        engine: whose tiers, vocabulary and limits it has.
        traces: one for every prompt that will be put to it.
        latency_ms: tier -> tokens of a pass -> milliseconds.
    """

    def __init__(self, engine: Engine, traces: Iterable[Trace], latency_ms: Mapping[str, Mapping[int, float]]) -> None:
        self.tiers = engine.tiers
        self.vocab_size = engine.vocab_size
        self.max_seq_len = engine.max_seq_len
        self.prefill_chunk = engine.max_seq_len  # reading a prompt is no part of what is predicted
        self.traces = list(traces)
        self.elapsed_ms = 0.0
        self.passes = 0
        self._latency = {tier: StepCost(times) for tier, times in latency_ms.items()}

    def new_buffers(self) -> ReplayBuffers:
        return ReplayBuffers(self)

    def count(self, tier: str, tokens: int) -> None:
        """A pass of `tier` over `tokens` tokens."""
        self.elapsed_ms += self._latency[tier](tokens)
        self.passes += 1


class ReplayBuffers:
    """One sequence's place in a trace; see `KVBuffers`."""

    def __init__(self, engine: ReplayEngine) -> None:
        self._engine = engine
        self._trace: Trace | None = None

    def forward(self, tier: str, tokens: Sequence[int], past: int, rows: int) -> list[Opinion]:
        """See `KVBuffers.forward`. Behind a token that is not in the text, tiers go on as they do along the text."""
        if past == 0:
            self._trace = self._find(tokens)
        else:
            self._engine.count(tier, len(tokens))
        assert self._trace is not None
        first = past + len(tokens) - rows + 1 - len(self._trace.prompt)
        return [self._opinion(tier, max(0, first + index)) for index in range(rows)]

    def _find(self, prompt: Sequence[int]) -> Trace:
        for trace in self._engine.traces:
            if trace.prompt == tuple(prompt):
                return trace
        raise ValueError("no trace was recorded for this prompt")

    def _opinion(self, tier: str, position: int) -> Opinion:
        assert self._trace is not None
        position = min(position, len(self._trace.text) - 1)
        if tier == FULL:
            return Opinion(self._trace.text[position], np.inf, 1.0)
        return self._trace.opinions[tier][position]
