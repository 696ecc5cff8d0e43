"""Plots of a bench, as SVG that stands in a page."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from via_sd.runtime.decoding.statistics import TOKEN_TIERS
from via_sd.tools.bench.run import Sample
from via_sd.tools.plotting import pyplot

Figures = Mapping[str, Mapping[str, Any]]

_TIER_COLOURS = {"draft": "#9bc1e6", "slim": "#f2b134", "full": "#4a6fa5"}
_GREY = "#888888"


def speed(figures: Figures) -> str:
    """Speed over plain decoding by setting and bucket, with the extremes of the repeats."""

    def draw(axes: Any) -> None:
        settings, buckets = list(figures), list(next(iter(figures.values())))
        width = 0.8 / len(settings)
        for index, setting in enumerate(settings):
            spreads = [figures[setting][bucket]["over_plain"] for bucket in buckets]
            middle = np.array([each["median"] for each in spreads])
            low = middle - [each["min"] for each in spreads]
            high = np.array([each["max"] for each in spreads]) - middle
            at = np.arange(len(buckets)) + (index - (len(settings) - 1) / 2) * width
            axes.bar(at, middle, width, yerr=np.maximum([low, high], 0), capsize=2, label=setting)
        axes.axhline(1, color=_GREY, linewidth=0.8)
        axes.set_xticks(np.arange(len(buckets)), buckets)
        axes.set_ylabel("speed over plain")
        axes.legend(fontsize=8)

    return _svg(draw)


def tier_shares(figures: Figures) -> str:
    """Share of the emitted tokens by the tier they came from."""

    def draw(axes: Any) -> None:
        settings = list(figures)[::-1]
        left = np.zeros(len(settings))
        for tier in TOKEN_TIERS:
            shares = np.array([figures[setting]["all"]["tiers"][tier] for setting in settings])
            axes.barh(settings, shares, left=left, color=_TIER_COLOURS[tier], label=tier)
            left += shares
        axes.set(xlabel="share of the emitted tokens", xlim=(0, 1))
        axes.legend(fontsize=8, ncols=3)

    return _svg(draw)


def acceptance_by_position(samples: Sequence[Sample]) -> str:
    """Share of drafted tokens that were kept, by their position in the block."""

    def draw(axes: Any) -> None:
        for setting in dict.fromkeys(sample.setting for sample in samples):
            runs = [s.stats.accepted_by_position for s in samples if s.setting == setting]
            longest = max(map(len, runs))
            if longest:
                means = [np.mean([run[j] for run in runs if len(run) > j]) for j in range(longest)]
                axes.plot(range(1, longest + 1), means, marker="o", markersize=3, label=setting)
        axes.set(xlabel="position in the drafted block", ylabel="accepted, mean over generations", ylim=(0, 1.05))
        axes.legend(fontsize=8)

    return _svg(draw)


def pass_latency(step_ms: Mapping[str, Mapping[int, float]]) -> str:
    """Latency of a forward pass over its length, by tier."""

    def draw(axes: Any) -> None:
        for tier, times in step_ms.items():
            axes.plot(list(times), list(times.values()), marker="o", markersize=3, label=tier)
        axes.set(xlabel="tokens of the pass", ylabel="milliseconds")
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(next(iter(step_ms.values()))), [str(s) for s in next(iter(step_ms.values()))])
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)

    return _svg(draw)


def divergence(figures: Figures, settings: Collection[str]) -> str:
    """Share of slim's tokens that the full verifier would not have written, for approximate `settings`."""

    def draw(axes: Any) -> None:
        buckets = list(next(iter(figures.values())))
        width = 0.8 / len(settings)
        for index, setting in enumerate(settings):
            rates = [100 * (figures[setting][bucket]["divergence"] or 0.0) for bucket in buckets]
            axes.bar(np.arange(len(buckets)) + (index - (len(settings) - 1) / 2) * width, rates, width, label=setting)
        axes.set_xticks(np.arange(len(buckets)), buckets)
        axes.set_ylabel("divergence, % of slim's tokens")
        axes.legend(fontsize=8)

    return _svg(draw)


def memory(megabytes: Mapping[str, float]) -> str:
    """Bytes that each part takes."""

    def draw(axes: Any) -> None:
        names = list(megabytes)[::-1]
        bars = axes.barh(names, [megabytes[name] for name in names], color="#4a6fa5")
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
        axes.margins(x=0.12)
        axes.set_xlabel("MB")

    return _svg(draw)


def prediction(predicted: Figures, figures: Figures) -> str:
    """Predicted against measured speed over plain, one point per setting and bucket."""

    def draw(axes: Any) -> None:
        highest = 1.0
        for setting in predicted.keys() & figures.keys():
            buckets = [bucket for bucket in predicted[setting] if bucket != "all"]
            x = [predicted[setting][bucket]["over_plain"] for bucket in buckets]
            y = [figures[setting][bucket]["over_plain"]["median"] for bucket in buckets]
            axes.scatter(x, y, s=18, label=setting)
            highest = max(highest, *x, *y)
        ends = np.array([0.0, 1.05 * highest])
        axes.plot(ends, ends, color=_GREY, linewidth=0.8)
        axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color=_GREY, alpha=0.15, linewidth=0)
        axes.set(xlabel="predicted, over plain", ylabel="measured, over plain (band: 10 %)", xlim=ends, ylim=ends)
        axes.legend(fontsize=8)

    return _svg(draw)


def _svg(draw: Callable[[Any], None]) -> str:
    plt = pyplot()
    with plt.rc_context(
        {"svg.hashsalt": "via-sd", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure, axes = plt.subplots(figsize=(5.6, 3.4), layout="constrained")
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        plt.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]  # without the XML declaration, which has no place within a page
