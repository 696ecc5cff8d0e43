"""An engine that repeats what the tiers of a model said along known texts, and adds up what its passes would take.

In an exact greedy mode the text is the full verifier's, whatever is drafted. What every tier says along that text and
what its passes cost decide which passes a mode makes and how long they take. Both are recorded once; every mode and
setting then runs without a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from via_sd.contract.graphs import DRAFTER, FULL
from via_sd.runtime.decoding.cost_model import StepCost
from via_sd.runtime.engines.protocol import Engine, KVBuffers, OneSequencePerPass
from via_sd.runtime.engines.rows import HostRow

#: Tokens a lower tier reads ahead of the full verifier's KV while it is recorded: about a block's length.
_BLOCK = 8


class NoLogitsError(NotImplementedError):
    """A setting looks at more of a row than its likeliest token: sampling, a penalty, a rule for tokens."""


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

    def is_finite(self) -> bool:
        return True

    def gap(self, token: int) -> float:
        """0 for the likeliest token. Any other lies at least the margin below it, and counts as just that."""
        return 0.0 if token == self.token else -self.lead

    @property
    def logits(self) -> np.ndarray:
        raise NoLogitsError("a replay has no logits: it serves greedy decoding without penalties")


@dataclass(frozen=True)
class Trace:
    """What was said along one text.

    Attributes:
        prompt: token ids.
        opinions: tier -> its opinion on every token behind the prompt; those of `full` are the text. A model drafter
            is the tier `drafter`.
    """

    prompt: tuple[int, ...]
    opinions: Mapping[str, tuple[Opinion, ...]]

    @property
    def text(self) -> tuple[int, ...]:
        """The full verifier's greedy text."""
        return tuple(opinion.token for opinion in self.opinions[FULL])


def record(
    verifier: Engine, drafter: Engine | None, prompt: Sequence[int], text: Sequence[int], shared_vocab: int = 0
) -> Trace:
    """What the tiers of `verifier` and a model `drafter` say along `text`, the full verifier's answer to `prompt`.

    A lower tier reads the full verifier's KV up to a few tokens back, as it does in `cascade`.

    Args:
        shared_vocab: tokens that a model drafter may propose.
    """
    top, *lower = verifier.tiers
    opinions: dict[str, list[Opinion]] = {tier: [] for tier in lower}
    # The row behind a token is an opinion on the next one, so the last token of the prompt is fed again.
    fed, first = [prompt[-1], *text[:-1]], len(prompt) - 1
    buffers = _read(verifier, prompt)
    own = None if drafter is None or drafter.max_seq_len < len(prompt) + len(text) else _read(drafter, prompt)
    if own is not None:
        opinions[DRAFTER] = []
    for start in range(0, len(fed), _BLOCK):
        block, past = fed[start : start + _BLOCK], first + start
        for tier in lower:
            opinions[tier] += _opinions(buffers, tier, block, past)
        buffers.forward(top, block, past, 1)
        if own is not None:
            opinions[DRAFTER] += _opinions(own, FULL, block, past, shared_vocab)
    said = {FULL: tuple(Opinion(token, np.inf, 1.0) for token in text)}
    return Trace(tuple(prompt), said | {tier: tuple(found) for tier, found in opinions.items()})


def _read(engine: Engine, prompt: Sequence[int]) -> KVBuffers:
    """KV buffers of `engine` that hold `prompt`."""
    buffers = engine.new_buffers()
    for start in range(0, len(prompt), engine.prefill_chunk):
        buffers.forward(engine.tiers[0], prompt[start : start + engine.prefill_chunk], start, 1)
    return buffers


def _opinions(
    buffers: KVBuffers, tier: str, block: Sequence[int], past: int, vocabulary: int | None = None
) -> list[Opinion]:
    rows = buffers.forward(tier, block, past, len(block))
    if vocabulary is not None:
        rows = [HostRow(row.logits[:vocabulary]) for row in rows]
    return [Opinion(row.argmax(), row.margin(), row.sum_exp()) for row in rows]


class Meter:
    """The time that replayed passes would take, in milliseconds, and their number by tier."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin at zero."""
        self.elapsed_ms = 0.0
        self.passes: dict[str, int] = {}

    def count(self, tier: str, milliseconds: float) -> None:
        self.elapsed_ms += milliseconds
        self.passes[tier] = self.passes.get(tier, 0) + 1


class ReplayEngine(OneSequencePerPass):
    """An `Engine` that says what was recorded.

    Args:
        engine: whose vocabulary and limits it has.
        tiers: its tiers -> whose opinions and latency they have in the traces and in `latency_ms`.
        traces: one for every prompt that will be put to it.
        latency_ms: tier of the traces -> tokens of a pass -> milliseconds.
        meter: counts its passes.
    """

    def __init__(
        self,
        engine: Engine,
        tiers: Mapping[str, str],
        traces: Iterable[Trace],
        latency_ms: Mapping[str, Mapping[int, float]],
        meter: Meter,
    ) -> None:
        self.tiers = tuple(tiers)
        self.vocab_size = engine.vocab_size
        self.max_seq_len = engine.max_seq_len
        self.prefill_chunk = engine.max_seq_len  # reading a prompt is no part of what is predicted
        self.recorded_as = tiers
        self._traces = list(traces)
        self._latency = {tier: StepCost(latency_ms[recorded]) for tier, recorded in tiers.items()}
        self._meter = meter

    def new_buffers(self) -> ReplayBuffers:
        return ReplayBuffers(self)

    def find(self, sequence: Sequence[int]) -> Trace:
        """The trace whose prompt `sequence` begins with."""
        begun = [trace for trace in self._traces if tuple(sequence[: len(trace.prompt)]) == trace.prompt]
        if not begun:
            raise ValueError("no trace was recorded for this prompt")
        return max(begun, key=lambda trace: len(trace.prompt))

    def count(self, tier: str, tokens: int) -> None:
        """A pass of `tier` over `tokens` tokens."""
        self._meter.count(self.recorded_as[tier], self._latency[tier](tokens))


class ReplayBuffers:
    """One sequence's place in a trace; see `KVBuffers`."""

    def __init__(self, engine: ReplayEngine) -> None:
        self._engine = engine
        self._trace: Trace | None = None

    def forward(self, tier: str, tokens: Sequence[int], past: int, rows: int) -> list[Opinion]:
        """See `KVBuffers.forward`. Behind a token that is not in the text, tiers go on as they do along the text."""
        if past == 0:
            self._trace = self._engine.find(tokens)
        else:
            self._engine.count(tier, len(tokens))
        assert self._trace is not None
        said = self._trace.opinions[self._engine.recorded_as[tier]]
        first = past + len(tokens) - rows + 1 - len(self._trace.prompt)
        return [said[min(max(0, first + index), len(said) - 1)] for index in range(rows)]
