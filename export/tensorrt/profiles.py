"""Optimisation profiles: for which step sizes an engine is built, checked at every corner before it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from via_sd.errors import ExportError

#: Tokens of a verify step: a draft block, and at most what `max_lag` lets pile up plus a block.
DEFAULT_TOKENS = (1, 8, 96)
#: Tokens of a prefill chunk.
DEFAULT_PREFILL = (1, 256, 512)
#: Cache slots a step is expected to look at.
_EXPECTED_VISIBLE = 1024
_CORNERS = ("min", "opt", "max")


@dataclass(frozen=True)
class Bounds:
    """Smallest, most expected and largest size of a dimension."""

    minimum: int
    optimum: int
    maximum: int

    @property
    def corners(self) -> tuple[int, int, int]:
        return self.minimum, self.optimum, self.maximum


@dataclass(frozen=True)
class Profile:
    """Step sizes one set of kernels is chosen for.

    Attributes:
        tokens: tokens fed at once.
        rows: rows of logits computed.
        visible: cache slots looked at.
    """

    name: str
    tokens: Bounds
    rows: Bounds
    visible: Bounds

    def to_json(self) -> dict[str, Any]:
        sizes = {"tokens": self.tokens, "rows": self.rows, "visible": self.visible}
        return {"name": self.name, **{name: list(bounds.corners) for name, bounds in sizes.items()}}


def plan_profiles(
    tokens: Sequence[int] | None, prefill: Sequence[int] | None, max_seq_len: int, *, separate: bool
) -> tuple[Profile, ...]:
    """The profiles of an engine.

    Args:
        tokens: (min, opt, max) tokens of a verify step, `DEFAULT_TOKENS` cut to the buffer if None.
        prefill: (min, opt, max) tokens of a prefill chunk, `DEFAULT_PREFILL` cut to the buffer if None.
        separate: a profile each for single step, verify step and prefill, which a library that chooses kernels at build
            time wants; else one profile for all, for one that specialises kernels to the sizes it meets.

    Raises:
        ExportError: a corner that no step can have.
    """
    verify = _bounds("tokens of a verify step", tokens, DEFAULT_TOKENS, max_seq_len)
    chunk = _bounds("tokens of a prefill chunk", prefill, DEFAULT_PREFILL, max_seq_len)
    visible = Bounds(1, min(_EXPECTED_VISIBLE, max_seq_len), max_seq_len)
    if separate:
        # Up to two, not one: for a size that is fixed a compiler picks kernels that want the weights in another layout,
        # and weights that are inputs are then moved into it in every step.
        single = Bounds(1, 1, min(2, chunk.maximum))
        profiles: tuple[Profile, ...] = (
            Profile("step", single, single, visible),
            Profile("verify", verify, verify, visible),
            Profile("prefill", chunk, single, visible),
        )
    else:
        every = Bounds(1, verify.optimum, max(verify.maximum, chunk.maximum))
        profiles = (Profile("any", every, Bounds(1, verify.optimum, verify.maximum), visible),)
    return tuple(_reachable(profile) for profile in profiles)


def _bounds(what: str, wanted: Sequence[int] | None, default: Sequence[int], max_seq_len: int) -> Bounds:
    values = tuple(min(value, max_seq_len) for value in default) if wanted is None else tuple(wanted)
    if len(values) != 3 or not 1 <= values[0] <= values[1] <= values[2] <= max_seq_len:
        raise ExportError(
            f"{what} are {','.join(map(str, values))}; wanted MIN,OPT,MAX with 1 <= MIN <= OPT <= MAX, at most "
            f"{max_seq_len}, the capacity of the KV buffers"
        )
    return Bounds(*values)


def _reachable(profile: Profile) -> Profile:
    """`profile` with no corner at which a step looks at fewer slots than it writes, or asks for rows it has not.

    A step of many tokens looks at no fewer slots, so the least a profile needs is its smallest step's.
    """
    visible = Bounds(
        max(profile.visible.minimum, profile.tokens.minimum),
        max(profile.visible.optimum, profile.tokens.optimum),
        profile.visible.maximum,
    )
    for corner, tokens, rows in zip(_CORNERS, profile.tokens.corners, profile.rows.corners, strict=True):
        if rows > tokens:
            raise ExportError(
                f"profile {profile.name} asks for {rows} rows of logits of {tokens} tokens at its {corner} corner"
            )
    return Profile(profile.name, profile.tokens, profile.rows, visible)
