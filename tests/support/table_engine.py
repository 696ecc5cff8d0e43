"""An engine of the runtime's protocol over a tiny vocabulary: no graph, but every rule of KV buffers enforced.

Logits are a function of what the buffers hold, not of what the caller believes they hold. So a stale token, a hole, KV
of too low a tier or a row that was kept too long shows up as an error or as a wrong distribution. A generation takes
microseconds, so that tests can sample distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from via_sd.runtime.engines.protocol import Block
from via_sd.runtime.engines.rows import HostRow, Row

#: Of (tier, the last tokens up to and including this position, digest of every token up to here): logits [vocab].
LogitsTable = Callable[[str, tuple[int, ...], int], np.ndarray]
RECENT = 4
ENGINE_TIERS = ("full", "slim", "deep")
_PRIME = (1 << 61) - 1


class EngineFailedError(RuntimeError):
    """Stands for whatever an inference library may raise in the middle of a step."""


def digest_of(tokens: Sequence[int]) -> int:
    """What an engine's `logits` get as the digest of a context of `tokens`."""
    digest = 1
    for token in tokens:
        digest = _extend(digest, token)
    return digest


def _extend(digest: int, token: int) -> int:
    return (digest * 1_000_003 + token + 17) % _PRIME


@dataclass(frozen=True)
class Call:
    """One forward call as the buffers received it."""

    tier: str
    tokens: tuple[int, ...]
    past: int
    rows: int


@dataclass(frozen=True)
class Pass:
    """One forward pass as the engine received it: tokens and past of every sequence in it."""

    tier: str
    blocks: list[tuple[int, int]]


@dataclass
class TableEngine:
    """See the module. `fails` is asked before each call, with the number of calls so far; True raises."""

    logits: LogitsTable
    vocab_size: int
    max_seq_len: int = 256
    tiers: tuple[str, ...] = ENGINE_TIERS
    prefill_chunk: int = 512
    max_sequences: int = 64
    fails: Callable[[TableKVBuffers], bool] = lambda buffers: False
    buffers: list[TableKVBuffers] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    released: list[TableKVBuffers] = field(default_factory=list)

    def release(self, buffers: TableKVBuffers) -> None:
        """See `via_sd.runtime.engines.protocol.Engine.release`."""
        assert buffers not in self.released, "buffers are released twice"
        self.released.append(buffers)

    def copy(self, source: TableKVBuffers, target: TableKVBuffers, positions: int) -> bool:
        """See `via_sd.runtime.engines.protocol.Engine.copy`."""
        assert source not in self.released
        assert all(author == 0 for _, _, author in source._cells[:positions]), "KV of a lower tier is copied"
        target._cells[:positions] = source._cells[:positions]
        return True

    def new_buffers(self) -> TableKVBuffers:
        buffers = TableKVBuffers(self)
        self.buffers.append(buffers)
        return buffers

    def forward(self, tier: str, blocks: Sequence[Block]) -> list[Sequence[Row]]:
        """See `via_sd.runtime.engines.protocol.Engine.forward`."""
        assert len({id(block.buffers) for block in blocks}) == len(blocks), "a pass takes the same buffers twice"
        self.passes.append(Pass(tier, [(len(block.tokens), block.past) for block in blocks]))
        return [block.buffers.forward(tier, block.tokens, block.past, block.rows) for block in blocks]


class TableKVBuffers:
    """KV of one sequence: per position its token, a digest of everything up to it, and the rank of who wrote it."""

    def __init__(self, engine: TableEngine) -> None:
        self._engine = engine
        self._cells: list[tuple[int, int, int]] = []
        self._lent: np.ndarray = np.zeros((0, engine.vocab_size), np.float32)
        self._busy = False
        self.calls: list[Call] = []

    def forward(self, tier: str, tokens: Sequence[int], past: int, rows: int) -> list[HostRow]:
        """See `via_sd.runtime.engines.protocol.KVBuffers.forward`."""
        assert not self._busy, "two threads use the same KV buffers"
        assert self not in self._engine.released, "buffers are used behind their release"
        self._busy = True
        try:
            if self._engine.fails(self):
                raise EngineFailedError("the engine failed in the middle of a step")
            return self._forward(self._engine.tiers.index(tier), tier, list(tokens), past, rows)
        finally:
            self._busy = False

    def _forward(self, rank: int, tier: str, tokens: list[int], past: int, rows: int) -> list[HostRow]:
        assert 1 <= rows <= len(tokens), f"{rows} rows of {len(tokens)} tokens"
        assert past + len(tokens) <= self._engine.max_seq_len, f"position {past + len(tokens) - 1} is past the buffer"
        assert past <= len(self._cells), f"fed at {past}, but only {len(self._cells)} positions were ever written"
        assert all(0 <= token < self._engine.vocab_size for token in tokens), f"{tokens} are not all in the vocabulary"
        # This is also what notices a lower tier that wrote over better KV: the higher one relies on it later.
        below = [i for i, (_, _, author) in enumerate(self._cells[:past]) if author > rank]
        assert not below, f"{tier} reads positions {below[:5]} that a lower tier wrote"
        self.calls.append(Call(tier, tuple(tokens), past, rows))
        # A real engine writes over the rows it lent: whoever still reads them must notice.
        self._lent.fill(np.nan)
        digest = self._cells[past - 1][1] if past else 1
        kept: list[tuple[int, int, int]] = []
        for token in tokens:
            digest = _extend(digest, token)
            kept.append((token, digest, rank))
        # What lay behind is void: a later reader of it would be wrong, and a hole makes sure that it is noticed.
        self._cells[past:] = kept
        logits = np.empty((rows, self._engine.vocab_size), np.float32)
        for row, end in enumerate(range(past + len(tokens) - rows, past + len(tokens))):
            recent = tuple(cell[0] for cell in self._cells[max(0, end + 1 - RECENT) : end + 1])
            logits[row] = self._engine.logits(tier, recent, self._cells[end][1])
        self._lent = logits
        return [HostRow(row) for row in logits]

    @property
    def held(self) -> list[int]:
        """Tokens in the buffers."""
        return [cell[0] for cell in self._cells]


def hashed_logits(vocab_size: int, *, sharpness: float = 3.0, slim: float = 0.5, deep: float = 1.0) -> LogitsTable:
    """Logits that depend on the whole context: pseudo-random logits, lower tiers differ from full by noise."""
    noise = {"full": 0.0, "slim": slim, "deep": deep}
    known: dict[tuple[str, int], np.ndarray] = {}

    def logits(tier: str, recent: tuple[int, ...], digest: int) -> np.ndarray:
        if (tier, digest) not in known:
            if len(known) > 20_000:
                known.clear()
            base, own = (np.random.Generator(np.random.Philox(key=[digest, k])) for k in (0, 1 + len(tier)))
            row = sharpness * (base.standard_normal(vocab_size) + noise[tier] * own.standard_normal(vocab_size))
            known[tier, digest] = row.astype(np.float32)
        return known[tier, digest]

    return logits


def markov_logits(vocab_size: int, *, order: int = 1, seed: int = 0, **scales: Any) -> LogitsTable:
    """Logits that depend on the last `order` tokens alone, so that a long text samples each distribution often."""
    source = hashed_logits(vocab_size, **scales)
    return lambda tier, recent, digest: source(tier, recent, digest_of([seed, *recent[-order:]]))


def scripted_logits(vocab_size: int, script: Mapping[str, Mapping[int, tuple[int, float]]]) -> LogitsTable:
    """Logits that follow a script: per tier and last token, the likeliest next token and its probability.

    What is left is spread evenly. A tier or token the script leaves out goes on with the next token at 0.9.
    """

    def logits(tier: str, recent: tuple[int, ...], digest: int) -> np.ndarray:
        last = recent[-1]
        token, probability = script.get(tier, {}).get(last, ((last + 1) % vocab_size, 0.9))
        probabilities = np.full(vocab_size, (1 - probability) / (vocab_size - 1))
        probabilities[token] = probability
        return np.log(probabilities).astype(np.float32)

    return logits
