"""The decoding modes, one generator function each: it yields the forward passes it needs, and None behind every round.

What is fed to which tier after each event: docs/architecture.md#cache-table.
"""

from __future__ import annotations

from collections.abc import Callable

from via_sd.contract.mode_names import CASCADE, PLAIN, ROUTED, SPECULATIVE
from via_sd.runtime.decoding.modes.cascade import cascade
from via_sd.runtime.decoding.modes.plain import plain
from via_sd.runtime.decoding.modes.routed import routed
from via_sd.runtime.decoding.modes.speculative import speculative
from via_sd.runtime.decoding.passes import Passes
from via_sd.runtime.decoding.run import Run

Mode = Callable[[Run], Passes[None]]

#: The function of every mode by its name.
MODE_FUNCTIONS: dict[str, Mode] = {PLAIN: plain, SPECULATIVE: speculative, CASCADE: cascade, ROUTED: routed}
