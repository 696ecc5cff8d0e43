"""The decoding modes, one generator function each: every `yield` ends a round, after its tokens were emitted.

Every chunk of a long prompt yields, too: before the first round those of the verifier, behind it the drafter's.

What is fed to which tier after each event: docs/architecture.md#cache-table.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from via_sd.contract.mode_names import CASCADE, PLAIN, ROUTED, SPECULATIVE
from via_sd.runtime.decoding.modes.cascade import cascade
from via_sd.runtime.decoding.modes.plain import plain
from via_sd.runtime.decoding.modes.routed import routed
from via_sd.runtime.decoding.modes.speculative import speculative
from via_sd.runtime.decoding.run import Run

Mode = Callable[[Run], Generator[None, None, None]]

#: The function of every mode by its name.
MODE_FUNCTIONS: dict[str, Mode] = {PLAIN: plain, SPECULATIVE: speculative, CASCADE: cascade, ROUTED: routed}
