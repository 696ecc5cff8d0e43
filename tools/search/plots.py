"""Pictures of a search: what it found over its evaluations, the mask, and the front over skip ratios."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from via_sd.masks import Mask, SearchResult, improvements
from via_sd.tools.plotting import pyplot
from via_sd.tools.search.front import FrontPoint

_KINDS = {"uniform": "tab:purple", "random": "0.6", "bayes": "tab:blue", "probe": "tab:orange", "refine": "tab:green"}
#: Colours of a mask's states.
_STATES = {"keep": "tab:blue", "int8": "tab:green", "int4": "tab:orange", "bridge": "0.75", "skip": "0.9"}
_COLOUR_NAMES = {"int8": "green", "int4": "orange", "bridge": "dark grey", "skip": "grey"}
_STATE_NAMES = {"skip": "skipped", "bridge": "bridged"}


def plot_search(result: SearchResult, path: Path) -> None:
    """Write a PNG: cost of every evaluation by kind with the best so far, and below it the mask."""
    records = result.records
    figure, (costs, layers) = pyplot().subplots(2, 1, figsize=(9, 6), height_ratios=(5, 1), layout="constrained")
    for kind, colour in _KINDS.items():
        chosen = [(i + 1, r.cost) for i, r in enumerate(records) if r.kind == kind]
        if chosen:
            costs.scatter(*zip(*chosen, strict=True), s=12, color=colour, label=kind)
    best = [(number, record.cost) for number, record in improvements(records, result.space)]
    if best:
        best.append((len(records), best[-1][1]))
        costs.step(*zip(*best, strict=True), where="post", color="black", linewidth=1, label="best so far")
    # Costs span decades, and a probe may cost nothing at all.
    costs.set_yscale("symlog", linthresh=1e-3)
    costs.set(xlabel="evaluation", ylabel="cost (nats per token)")
    costs.legend(loc="upper right", fontsize=8)
    _draw_mask(layers, result.mask)
    _save(figure, path)


def plot_front(points: Sequence[FrontPoint], path: Path) -> None:
    """Write a PNG: agreement, KL and measured step time over what was asked for, and every mask."""
    figure, axes = pyplot().subplots(
        2, 1, figsize=(9, 4 + 0.4 * len(points)), height_ratios=(4, 0.4 * len(points) + 1), layout="constrained"
    )
    quality, masks = axes
    ratios = [point.asked for point in points]
    asked = "cost asked for" if points[0].within_cost else "skip ratio"
    quality.plot(ratios, [point.agreement for point in points], "o-", color="tab:blue", label="top-1 agreement")
    quality.plot(ratios, [point.step_ratio for point in points], "s--", color="0.5", label="step time over full")
    quality.set(xlabel=asked, ylim=(0, 1.05))
    divergence = quality.twinx()
    divergence.plot(ratios, [point.kl for point in points], "^-", color="tab:red", label="KL")
    divergence.set_ylabel("KL(full || slim), nats per token", color="tab:red")
    quality.legend(loc="lower left", fontsize=8)
    for row, point in enumerate(points):
        _draw_row(masks, point.mask, row)
    masks.set_yticks(range(len(points)), [f"{ratio:g}" for ratio in ratios])
    masks.set(ylabel=asked, ylim=(len(points) - 0.5, -0.5), xlim=(-0.6, points[0].mask.num_layers - 0.4))
    _label_layers(masks, [point.mask for point in points])
    _save(figure, path)


def _draw_mask(axes: Any, mask: Mask) -> None:
    for row, states in enumerate((mask.attention, mask.mlp)):
        for layer, state in enumerate(states):
            axes.bar(layer, 0.9, bottom=row - 0.45, width=0.9, color=_STATES[state])
    axes.set_yticks([0, 1], ["attention", "MLP"])
    _label_layers(axes, [mask])
    axes.set(xlim=(-0.6, mask.num_layers - 0.4))
    axes.invert_yaxis()


def _draw_row(axes: Any, mask: Mask, row: int) -> None:
    for layer, (attention, mlp) in enumerate(zip(mask.attention, mask.mlp, strict=True)):
        axes.bar(layer - 0.22, 0.8, bottom=row - 0.4, width=0.42, color=_STATES[attention])
        axes.bar(layer + 0.22, 0.8, bottom=row - 0.4, width=0.42, color=_STATES[mlp])


def _label_layers(axes: Any, masks: Sequence[Mask]) -> None:
    """Name the layer axis, and the colours of the states that occur besides `keep`."""
    found = {state for mask in masks for state in mask.states} - {"keep"}
    names = [f"{_COLOUR_NAMES[state]}: {_STATE_NAMES.get(state, state)}" for state in _STATES if state in found]
    axes.set(xlabel=f"layer ({', '.join(names)})" if names else "layer")


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot().close(figure)
