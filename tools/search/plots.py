"""Pictures of a search: what it found over its evaluations, the mask, and the front over skip ratios."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from via_sd.masks import Mask, Record, improvements
from via_sd.tools.plotting import pyplot
from via_sd.tools.search.front import FrontPoint

_KINDS = {"random": "0.6", "bayes": "tab:blue", "probe": "tab:orange", "refine": "tab:green"}


def plot_search(records: Sequence[Record], budget: int, mask: Mask, path: Path) -> None:
    """Write a PNG: cost of every evaluation by kind with the best so far, and below it the mask.

    Args:
        records: the evaluations in order; those that skip fewer than `budget` units only inform the others.
        mask: what the search found.
    """
    figure, (costs, layers) = pyplot().subplots(2, 1, figsize=(9, 6), height_ratios=(5, 1), layout="constrained")
    for kind, colour in _KINDS.items():
        chosen = [(i + 1, r.cost) for i, r in enumerate(records) if r.kind == kind]
        if chosen:
            costs.scatter(*zip(*chosen, strict=True), s=12, color=colour, label=kind)
    best = [(number, record.cost) for number, record in improvements(records, budget)]
    if best:
        best.append((len(records), best[-1][1]))
        costs.step(*zip(*best, strict=True), where="post", color="black", linewidth=1, label="best so far")
    # Costs span decades, and a probe may cost nothing at all.
    costs.set_yscale("symlog", linthresh=1e-3)
    costs.set(xlabel="evaluation", ylabel="cost (nats per token)")
    costs.legend(loc="upper right", fontsize=8)
    _draw_mask(layers, mask)
    _save(figure, path)


def plot_front(points: Sequence[FrontPoint], path: Path) -> None:
    """Write a PNG: agreement and KL over the skip ratio and over the measured step time, and every mask."""
    figure, axes = pyplot().subplots(
        2, 1, figsize=(9, 4 + 0.4 * len(points)), height_ratios=(4, 0.4 * len(points) + 1), layout="constrained"
    )
    quality, masks = axes
    ratios = [point.skip_ratio for point in points]
    quality.plot(ratios, [point.agreement for point in points], "o-", color="tab:blue", label="top-1 agreement")
    quality.plot(ratios, [point.step_ratio for point in points], "s--", color="0.5", label="step time over full")
    quality.set(xlabel="skip ratio", ylim=(0, 1.05))
    divergence = quality.twinx()
    divergence.plot(ratios, [point.kl for point in points], "^-", color="tab:red", label="KL")
    divergence.set_ylabel("KL(full || slim), nats per token", color="tab:red")
    quality.legend(loc="lower left", fontsize=8)
    for row, point in enumerate(points):
        _draw_row(masks, point.mask, row)
    masks.set_yticks(range(len(points)), [f"{ratio:g}" for ratio in ratios])
    masks.set(xlabel="layer", ylabel="skip ratio", ylim=(len(points) - 0.5, -0.5), xlim=(-0.6, _layers(points) - 0.4))
    _save(figure, path)


def _draw_mask(axes: Any, mask: Mask) -> None:
    for row, flags in enumerate((mask.keep_attention, mask.keep_mlp)):
        for layer, keep in enumerate(flags):
            axes.bar(layer, 0.9, bottom=row - 0.45, width=0.9, color="tab:blue" if keep else "0.9")
    axes.set_yticks([0, 1], ["attention", "MLP"])
    axes.set(xlabel="layer (grey: skipped)", xlim=(-0.6, mask.num_layers - 0.4))
    axes.invert_yaxis()


def _draw_row(axes: Any, mask: Mask, row: int) -> None:
    for layer, (attention, mlp) in enumerate(zip(mask.keep_attention, mask.keep_mlp, strict=True)):
        axes.bar(layer - 0.22, 0.8, bottom=row - 0.4, width=0.42, color="tab:blue" if attention else "0.9")
        axes.bar(layer + 0.22, 0.8, bottom=row - 0.4, width=0.42, color="tab:blue" if mlp else "0.9")


def _layers(points: Sequence[FrontPoint]) -> int:
    return points[0].mask.num_layers


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot().close(figure)
