"""Names of the decoding modes and of the routers: what a request can ask for, without the code that does it."""

from __future__ import annotations

PLAIN, SPECULATIVE, CASCADE, ROUTED = MODES = ("plain", "speculative", "cascade", "routed")
#: What `calibrate` found fastest on this machine.
AUTO = "auto"
#: Modes whose output has exactly the full verifier's distribution.
EXACT_MODES = frozenset({PLAIN, SPECULATIVE, CASCADE})
#: Modes that need a slim-verifier.
SLIM_MODES = frozenset({CASCADE, ROUTED})

PAPER, ADAPTIVE, CALIBRATED = ROUTERS = ("paper", "adaptive", "calibrated")
