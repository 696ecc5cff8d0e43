"""What slim's margins say about the full verifier, from an audit of both."""

from __future__ import annotations

from collections.abc import Iterable

from via_sd.runtime.decoding.router import RouterMargins
from via_sd.runtime.decoding.statistics import JudgedMargin
from via_sd.tools.bench.run import Sample

#: Shares of differing tokens that a router is calibrated for, beside the one that was asked for.
SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)


def judged_once(samples: Iterable[Sample]) -> list[JudgedMargin]:
    """What `samples` found out about slim, each context counted once: settings often write the same text."""
    found: dict[tuple[int, tuple[int, ...]], JudgedMargin] = {}
    for sample in samples:
        for judged in sample.margins:
            found.setdefault((sample.prompt, tuple(sample.token_ids[: judged.position])), judged)
    return list(found.values())


def fit_margins(judged: Iterable[JudgedMargin], max_divergence: float) -> RouterMargins:
    """The router that lets most tokens through, for `max_divergence` and for other shares.

    Of the tokens with a margin m or more, of which k of n differed, the share that will differ is taken to be
    (k + 1) / (n + 1): with little evidence, little is let through.
    """
    ranked = sorted(judged, key=lambda each: -each.margin)
    shares = sorted({*SHARES, max_divergence})
    margins: dict[float, float] = {}
    differed = 0
    for count, each in enumerate(ranked, 1):
        differed += not each.agreed
        if count < len(ranked) and ranked[count].margin == each.margin:
            continue  # tokens with equal margins go the same way
        expected = (differed + 1) / (count + 1)
        margins |= {share: each.margin for share in shares if expected <= share}
    return RouterMargins(max_divergence, dict(sorted(margins.items())))
