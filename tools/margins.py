"""What slim's margins say about the full verifier, from an audit of both."""

from __future__ import annotations

from collections.abc import Iterable

from via_sd.runtime.router import CalibratedRouter

#: Shares of differing tokens that a router is calibrated for, beside the one that was asked for.
SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)


def calibrate_router(judged: Iterable[tuple[float, bool]], max_divergence: float) -> CalibratedRouter:
    """The router that lets most tokens through, for `max_divergence` and for other shares.

    Of the tokens with a margin m or more, of which k of n differed, the share that will differ is taken to be
    (k + 1) / (n + 1): with little evidence, little is let through.

    Args:
        judged: slim's margins, and whether full's choice was the same (see `Completion.margins`).
    """
    ranked = sorted(judged, key=lambda each: -each[0])
    shares = sorted({*SHARES, max_divergence})
    margins: dict[float, float] = {}
    differed = 0
    for count, (margin, agreed) in enumerate(ranked, 1):
        differed += not agreed
        if count < len(ranked) and ranked[count][0] == margin:
            continue  # tokens with equal margins go the same way
        expected = (differed + 1) / (count + 1)
        margins |= {share: margin for share in shares if expected <= share}
    return CalibratedRouter(max_divergence, dict(sorted(margins.items())))
