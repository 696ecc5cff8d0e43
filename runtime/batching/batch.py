"""Which sequences share the next forward pass.

A pass is of one tier of one engine. Of the passes that sequences wait for, the kind that most wait for runs first, so
that passes of every tier are as full as they get: while the slim-verifier serves most of them, the few that need the
full verifier wait until they are not so few. No one waits for more than `PATIENCE` passes.

Parts of long prompts are passes of a kind of their own: attention pads the tokens of all sequences of a pass to as many
as the longest has, and a part of a prompt keeps the processor busy by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

from via_sd.runtime.batching.member import Member
from via_sd.runtime.decoding.passes import Beside, PassRequest, PassResult
from via_sd.runtime.engines.protocol import Block

#: Passes of others that a sequence waits for at most, as long as the tokens of its own fit the limit.
PATIENCE = 4
#: Tokens of one sequence from which on they count as part of a prompt.
LONG = 48
#: Tokens of a pass.
MAX_TOKENS = 128
#: Tokens of a pass over prompts while other sequences are being decoded, which wait for it.
MAX_PROMPT_TOKENS = 64
_LEAST_PART = 16  # fewer tokens of another prompt are not worth its row


class PassTotals(NamedTuple):
    """Forward passes so far, the sequences and the tokens in them, and the seconds inside the engines."""

    passes: int = 0
    sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Batch:
    """Runs the passes of the sequences that have joined, one pass at a time; not for several threads at once.

    Args:
        clock: tells the time in seconds.

    Attributes:
        members: sequences in the batch, those whose last pass is longest ago first.
        totals: replaced behind every pass, so another thread may read it at any time.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.members: list[Member] = []
        self.totals = PassTotals()
        self._clock = clock or _now
        self._paused = 0.0  # seconds in which nobody ran passes
        self._stopped: float | None = None

    def join(self, member: Member) -> None:
        """Take in a sequence that has asked for its first pass."""
        self._asks(member)
        self.members.append(member)

    def leave(self, member: Member) -> None:
        """Let a sequence go; one that has ended has gone already."""
        if member in self.members:
            self.members.remove(member)

    def stop(self) -> None:
        """Nobody runs passes for now: the time until the next one counts for no sequence."""
        if self._stopped is None:
            self._stopped = self._clock()

    def run_pass(self) -> bool:
        """Run one pass and take all that share it to their next; False if nobody waits for one."""
        if self._stopped is not None:
            self._paused += self._clock() - self._stopped
            self._stopped = None
        for member in self.members:
            if member.held_up:
                self._advance(member)
        chosen = self._choose()
        others = [member for member in self.members if member not in chosen]
        for member in others:
            member.waited += member.request is not None
        if chosen:
            self._run(list(chosen.items()))
        # Who had a turn is behind those who had none: where a pass has no room for all, they take turns.
        self.members = [member for member in (*others, *chosen) if not member.ended]
        return bool(chosen)

    # -- which ---------------------------------------------------------------------------------------------------------

    def _choose(self) -> dict[Member, Block]:
        """Who shares the next pass, and with what."""
        if len(self.members) == 1 and (request := self.members[0].request) is not None:
            return {self.members[0]: request.part(request.engine.prefill_chunk)}
        kinds: dict[_Kind, list[Member]] = {}
        for member in self.members:
            if member.request is not None:
                kinds.setdefault(_kind(member.request), []).append(member)
        if not kinds:
            return {}
        patience = {kind: max(member.waited for member in members) for kind, members in kinds.items()}
        kind = max(kinds, key=lambda kind: (max(patience[kind], PATIENCE - 1), len(kinds[kind])))
        # Sorting is stable: those who waited alike stay in their order.
        candidates = sorted(kinds[kind], key=lambda member: -member.waited)
        return _fill_prompts(candidates, beside=len(kinds) > 1) if kind.prompt else _fill(candidates)

    # -- run -----------------------------------------------------------------------------------------------------------

    def _run(self, chosen: Sequence[tuple[Member, Block]]) -> None:
        request = chosen[0][0].request
        assert request is not None
        blocks = [block for _, block in chosen]
        begun = self._clock()
        try:
            found = request.engine.forward(request.tier, blocks)
        except Exception as error:  # noqa: BLE001 - a failed pass ends its sequence, not the others
            if len(chosen) == 1:
                chosen[0][0].fail(error)
                return
            # Whose fault it is nobody knows. What was fed can be fed again: it lies behind all that counts.
            for pair in chosen:
                self._run([pair])
            return
        seconds, tokens = self._clock() - begun, sum(len(block.tokens) for block in blocks)
        so_far = self.totals
        self.totals = PassTotals(
            so_far.passes + 1, so_far.sequences + len(blocks), so_far.tokens + tokens, so_far.seconds + seconds
        )
        for (member, block), rows in zip(chosen, found, strict=True):
            paused = min(self._paused - member.paused, begun - member.asked)
            waited = begun - member.asked - paused
            fed = len(block.tokens)
            beside = Beside(len(blocks) - 1, tokens - fed)
            self._advance(member, PassResult(rows, fed, seconds, waited, paused, beside))

    def _advance(self, member: Member, result: PassResult | None = None) -> None:
        member.advance(result)
        self._asks(member)

    def _asks(self, member: Member) -> None:
        member.asked, member.paused = self._clock(), self._paused


class _Kind(NamedTuple):
    """What passes have in common that can be one."""

    engine: int
    tier: str
    prompt: bool


def _kind(request: PassRequest) -> _Kind:
    block = request.block
    longest = min(LONG, request.engine.prefill_chunk + block.rows)
    return _Kind(id(request.engine), request.tier, len(block.tokens) > longest)


def _now() -> float:
    return perf_counter()


def _fill(candidates: Sequence[Member]) -> dict[Member, Block]:
    """As many of `candidates` as a pass has room for, at least the first."""
    chosen: dict[Member, Block] = {}
    room = MAX_TOKENS
    for member in candidates:
        request = member.request
        assert request is not None
        if len(chosen) == request.engine.max_sequences:
            break
        block = request.block
        if not chosen or len(block.tokens) <= room:
            chosen[member] = block
            room -= len(block.tokens)
    return chosen


def _fill_prompts(candidates: Sequence[Member], *, beside: bool) -> dict[Member, Block]:
    """Parts of prompts for one pass; less where others wait `beside`."""
    chosen: dict[Member, Block] = {}
    request = candidates[0].request
    assert request is not None
    longest = request.engine.prefill_chunk
    room = min(longest, MAX_PROMPT_TOKENS) if beside else longest
    for member in candidates:
        assert member.request is not None
        block = member.request.part(room)
        # Only alone may a block be longer than a chunk: padding has no more room than that.
        if not chosen or len(block.tokens) <= min(room, longest):
            chosen[member] = block
            room -= len(block.tokens)
        if room < _LEAST_PART or len(chosen) == request.engine.max_sequences:
            break
    return chosen
