"""Fit bridges: linear maps of the residual stream in the place of runs of sublayers that a tier leaves out.

Each is the ridge regression, in closed form, of what the run adds to the stream on the stream before it, over texts
that the model wrote itself. Bridges of a tier are fitted in order, each on the stream that the tier has there: with
its own sublayers and bridges before, and the KV that they write. The first position of a text, where activations are
hundreds of times larger than elsewhere, is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from via_sd.errors import ExportError
from via_sd.export.passes import Bridge, OpenStreamPass, Segment, Substitutes, bridge_name
from via_sd.export.writer.open_session import OpenSession
from via_sd.export.writer.weights import save_graph
from via_sd.masks import Mask
from via_sd.progress import Progress

#: Texts that the model writes, and tokens of each.
TEXTS, TOKENS = 16, 384
#: Weight of the penalty on the map, as a share of the mean square of the stream's channels times the positions.
RIDGE = 1e-2
#: Beside the weights it refers to, until it is loaded.
_OPEN_GRAPH = ".open.onnx"

Floats = NDArray[np.float32]


def fit_bridges(
    model: ir.Model,
    masks: Sequence[Mask],
    substitutes: Substitutes,
    weights: Mapping[str, ir.ExternalTensor],
    directory: Path,
    precision: str,
    config: Mapping[str, Any],
    max_seq_len: int,
    progress: Progress,
) -> dict[str, Bridge]:
    """The bridges of `masks`, by name.

    Args:
        model: full's graph, not routed.
        substitutes: the variants that the masks run sublayers in.
        weights: where the weights of `model` and variants lie in `directory`, by name.
        precision: of full.
        config: of the model.
        max_seq_len: capacity of a KV buffer in tokens.

    Raises:
        ExportError: a stream with NaN or Inf.
    """
    boundaries = sorted({b for mask in masks for run in mask.bridges for b in (run.start, run.stop)})
    if not boundaries:
        return {}
    segments = _segments(masks)
    opened = OpenStreamPass(segments, boundaries, substitutes)(model.clone()).model
    file = directory / _OPEN_GRAPH
    save_graph(opened, file, dict(weights))
    session = OpenSession(file, segments)
    file.unlink()
    progress("writing text to fit bridges to", None)
    texts = session.write_texts(first_tokens(config), min(TOKENS, max_seq_len))
    bridges: dict[str, Bridge] = {}
    for mask in masks:
        bits = _bits(mask, precision)
        states = list(mask.states)
        streams: list[Floats] | None = None
        at = 0
        for run in mask.bridges:
            progress(f"fitting the bridge of {mask.name} over sublayers {run.start} to {run.stop - 1}", None)
            before = session.streams(texts, streams, {i: states[i] for i in range(at, run.start)}, run.start)
            behind = session.streams(texts, before, dict.fromkeys(run, "keep"), run.stop)
            bridge = fit_bridge(before, [b - a for a, b in zip(before, behind, strict=True)], bits)
            if not np.isfinite(bridge.weight).all() or not np.isfinite(bridge.bias).all():
                raise ExportError(
                    f"the bridge of {mask.name} over sublayers {run.start} to {run.stop - 1} has NaN or Inf: the "
                    "residual stream has them there; skip or keep these sublayers"
                )
            bridges[bridge_name(mask, run)] = bridge
            streams = [stream + (stream @ bridge.weight + bridge.bias) for stream in before]
            at = run.stop
    return bridges


def _segments(masks: Sequence[Mask]) -> list[Segment]:
    """Every sublayer as a segment of its own, with a branch for each precision that some mask runs it in."""
    precisions = [
        sorted({mask.states[unit] for mask in masks} - {"keep", "skip", "bridge"})
        for unit in range(len(masks[0].states))
    ]
    return [Segment(unit, unit + 1, ("keep", *found, "skip")) for unit, found in enumerate(precisions)]


def first_tokens(config: Mapping[str, Any]) -> list[int]:
    """What the texts begin with: the token that begins a text in training, or for want of one any tokens."""
    begin = config.get("bos_token_id")
    if isinstance(begin, int):
        return [begin] * TEXTS
    return [int(token) for token in np.random.default_rng(0).integers(0, int(config["vocab_size"]), TEXTS)]


def fit_bridge(before: Sequence[Floats], added: Sequence[Floats], bits: int) -> Bridge:
    """The bridge that adds what is nearest to `added`, given the stream `before`; each [positions, width] of a text."""
    inputs, targets = (np.concatenate([part[1:] for part in parts]).astype(np.float64) for parts in (before, added))
    mean_in, mean_out = inputs.mean(0), targets.mean(0)
    inputs -= mean_in
    targets -= mean_out
    gram = inputs.T @ inputs
    penalty = RIDGE * np.trace(gram) / len(gram)
    weight = np.linalg.solve(gram + penalty * np.eye(len(gram)), inputs.T @ targets)
    energy = np.square(inputs + mean_in).mean(0)
    return Bridge(
        weight=weight.astype(np.float32),
        bias=(mean_out - mean_in @ weight).astype(np.float32),
        energy=energy.astype(np.float32),
        bits=bits,
    )


def _bits(mask: Mask, precision: str) -> int:
    """Bits of the weights of a tier's bridges: those that most of its sublayers run in."""
    states = Counter(state for state, runs in zip(mask.states, mask.sublayers, strict=True) if runs)
    commonest = max(states, key=lambda state: states[state])
    return {"fp32": 32, "int8": 8, "int4": 4}[precision if commonest == "keep" else commonest]
