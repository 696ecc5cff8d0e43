"""Write one decoder of a bundle: its graphs over one weights file, and the check of what was written.

lowered graph
  -> FuseGateUpPass   what is quantised: gate and up projection as one product
  -> check            the float32 graph against its reference, with the weights as they are in memory
  -> QuantizePass     (CastPass for 16 bits) full, and a variant for each other precision that a mask names
  -> RoutePass        every tier in one graph; PrunePass: each mask's tier as a graph of its own
  -> write            weights once, graphs that refer to them; bridges are fitted with what is written, and written
  -> check            the written graph against the reference
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from via_sd.contract.graphs import FULL, KEEP
from via_sd.export.passes import (
    FuseGateUpPass,
    PrunePass,
    RoutePass,
    Substitutes,
    find_sublayers,
    keep_vector,
    plan_segments,
)
from via_sd.export.passes.lower import lower
from via_sd.export.sources.checkpoint import Checkpoint
from via_sd.export.writer.bridges import fit_bridges
from via_sd.export.writer.check import (
    FP16_TOLERANCE,
    FP32_TOLERANCE,
    Reference,
    check_logits,
    reference_logits,
    source_logits,
)
from via_sd.export.writer.describe import describe_kv, describe_values
from via_sd.export.writer.input_energy import add_energy_outputs, input_energy
from via_sd.export.writer.precision import halve, is_half, quantise
from via_sd.export.writer.stepper import Stepper
from via_sd.export.writer.variants import quantised_variants
from via_sd.export.writer.weights import (
    WEIGHTS_FILE,
    added_bytes,
    append_weights,
    save_graph,
    weights_as_inputs,
    write_weights,
)
from via_sd.masks import Mask
from via_sd.progress import Progress

GRAPH_FILE = "model.onnx"


@dataclass(frozen=True)
class WrittenDecoder:
    """One exported decoder: what the manifest says of it, and how the check of it went (None: not checked)."""

    manifest: dict[str, Any]
    check: dict[str, Any] | None


def write_decoder(
    source: Checkpoint,
    directory: Path,
    masks: list[Mask],
    precision: str,
    activations: str,
    max_seq_len: int,
    check: bool,
    progress: Progress,
) -> WrittenDecoder:
    """Write the graphs and the weights of `source`, which is changed on the way, to the existing `directory`.

    Args:
        masks: of the tiers besides full, nested.
        precision: of the weights.
        activations: `fp32`, `fp16` or `bf16`: of activations and KV.
        max_seq_len: capacity of a KV buffer in tokens.
        check: compare with transformers, or with the graph it came from.

    Raises:
        ExportError: a graph that does not compute what its reference does.
        UnsupportedModelError: a model whose structure or semantics a bundle cannot have.
    """
    lower(source.model, source.config, max_seq_len)
    reference = _reference(source, max_seq_len, progress) if check else None
    # In a decoder of some precision, a mask that names it means what full does.
    branches = [mask.keeping(precision) for mask in masks]
    model, substitutes = _quantised(source, branches, precision, activations, reference, max_seq_len, progress)
    kv = describe_kv(model)
    weights = write_weights(_without_bridges(model, branches, substitutes), directory, progress)
    bridges = fit_bridges(
        model, branches, substitutes, weights, directory, precision, source.config, max_seq_len, progress
    )
    substitutes = replace(substitutes, bridges=bridges)
    segments = plan_segments(branches, 2 * source.identity.num_layers)
    routed = RoutePass(segments, substitutes)(model.clone()).model
    slims = [PrunePass(mask, substitutes)(model.clone()).model for mask in branches]

    append_weights(routed, directory, weights)
    save_graph(routed, directory / GRAPH_FILE, weights)
    full = [True] * sum(len(segment.branches) - 1 for segment in segments)
    own, *added = added_bytes([model, *slims], weights)
    tiers: dict[str, Any] = {FULL: {KEEP.name: full, "graph": f"{directory.name}/{GRAPH_FILE}", "added_bytes": own}}
    for mask, branch, slim, size in zip(masks, branches, slims, added, strict=True):
        name = "slim.onnx" if len(masks) == 1 else f"slim-{mask.name}.onnx"
        save_graph(slim, directory / name, weights)
        tiers[mask.name] = {
            KEEP.name: keep_vector(branch, segments),
            "graph": f"{directory.name}/{name}",
            "mask": mask.to_json(),
            "added_bytes": size,
        }
    result = None
    if reference and activations != "bf16":  # for which ONNX Runtime's CPU provider has no kernels
        progress("checking the bundle's graph", None)
        found = check_logits(
            Stepper(directory / GRAPH_FILE),
            reference,
            quantised=_is_quantised(source, precision),
            tolerance=FP16_TOLERANCE if is_half(activations) else FP32_TOLERANCE,
        )
        result = {"against": reference.computed_by, **found.to_json()}
    manifest = {
        "graph": f"{directory.name}/{GRAPH_FILE}",
        "weights": f"{directory.name}/{WEIGHTS_FILE}",
        "inputs": describe_values(routed.graph.inputs),
        "outputs": describe_values(routed.graph.outputs),
        "kv": kv,
        "vocab_size": int(source.config["vocab_size"]),
        "segments": [asdict(segment) for segment in segments],
        "tiers": tiers,
    }
    return WrittenDecoder(manifest, result)


def _without_bridges(model: ir.Model, masks: list[Mask], substitutes: Substitutes) -> ir.Model:
    """The routed graph of the tiers, for its weights; bridges are fitted with them."""
    segments = plan_segments([mask.without_bridges() for mask in masks], len(find_sublayers(model.graph)))
    return RoutePass(segments, substitutes)(model.clone()).model


def _is_quantised(source: Checkpoint, precision: str) -> bool:
    """Whether the export quantises full."""
    return source.precision is None and precision.startswith("int")


def _quantised(
    source: Checkpoint,
    masks: list[Mask],
    precision: str,
    activations: str,
    reference: Reference | None,
    max_seq_len: int,
    progress: Progress,
) -> tuple[ir.Model, Substitutes]:
    """Full's graph in `precision`, and what `masks` run in other precisions."""
    model = source.model
    if precision == "fp32" and not any(mask.precisions for mask in masks):
        return model, Substitutes()
    fused: ir.Model = model.clone()
    FuseGateUpPass()(fused)
    quantise_full = _is_quantised(source, precision)
    half = is_half(activations)
    fitted = any("int4" in mask.precisions for mask in masks) or (quantise_full and precision == "int4")
    energy = _measure(fused, source.config, reference if quantise_full or half else None, fitted, max_seq_len, progress)
    substitutes = Substitutes(quantised_variants(fused, masks, energy, progress))
    if quantise_full:
        quantise(fused, precision, progress, energy)
    full = fused if quantise_full or source.precision is not None else model
    if half:
        for graph in (full, *substitutes.variants.values()):
            halve(graph, activations)
    return full, substitutes


def _reference(source: Checkpoint, max_seq_len: int, progress: Progress) -> Reference:
    if source.source is not None:
        progress("running the graph as it came", None)
        return source_logits(source.source, max_seq_len, source.config)
    progress("running the checkpoint in transformers", None)
    assert source.reference is not None
    return reference_logits(source.reference, max_seq_len, source.config)


def _measure(
    fused: ir.Model,
    config: dict[str, Any],
    reference: Reference | None,
    fitted: bool,
    max_seq_len: int,
    progress: Progress,
) -> dict[str, np.ndarray]:
    """Hold the float32 graph that is about to be quantised or cast to float32 limits: later only that can differ.

    Args:
        reference: None if there is nothing to compare.
        fitted: weights in int4 are fitted to their inputs.

    Returns:
        The input energies that int4 is fitted to; int8 needs none.
    """
    if not reference and not fitted:
        return {}
    progress("checking the graph before it is quantised" if reference else "measuring the graph's activations", None)
    plain: ir.Model = fused.clone()
    if fitted:
        add_energy_outputs(plain)
    # The weights are fed, not written: a copy on disk would be as large as the checkpoint.
    stepper = Stepper(*weights_as_inputs(plain))
    if reference:
        check_logits(stepper, reference, quantised=False)
    return input_energy(stepper, int(config["vocab_size"]), max_seq_len) if fitted else {}
