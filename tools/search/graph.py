"""The graph the mask search runs: every sublayer behind its own flag, and the residual stream open at its boundaries.

A decoder graph goes in (one that `export_bundle` would write, from a checkpoint or out of a bundle), an open graph
comes out: a candidate that shares its first sublayers with one that ran before starts from the stream that one left.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx_ir as ir

from via_sd.contract.manifest import MANIFEST, TOKENIZER_FILE
from via_sd.errors import ExportError, ViaSdError
from via_sd.export.passes import OpenStreamPass, Substitutes, find_sublayers, sublayer_segments
from via_sd.export.passes.lower import lower
from via_sd.export.portable.unroute import UnroutePass
from via_sd.export.sources.checkpoint import open_checkpoint
from via_sd.export.writer.describe import describe_kv
from via_sd.export.writer.limits import capacity
from via_sd.export.writer.tokenizer import export_tokenizer
from via_sd.export.writer.variants import quantised_copies
from via_sd.export.writer.weights import load_graph, save_graph, write_weights
from via_sd.files import write_json
from via_sd.masks import QUANTISED_STATES, QuantisedState
from via_sd.runtime import load_bundle
from via_sd.tools.search.session import DESCRIPTION_FILE, GRAPH_FILE, REFUSED


def write_search_graph(
    model: ir.Model, directory: Path, variants: Mapping[str, ir.Model] = MappingProxyType({})
) -> dict[str, Any]:
    """Turn the decoder graph `model`, in place, into the search's and write it with its weights to `directory`.

    Args:
        variants: the decoder with all its weights quantised, by state.

    Returns:
        For the description: the boundaries that can be read, about ten, and the end of the last sublayer; the states of
        each sublayer and of the LM head.
    """
    count = len(find_sublayers(model.graph))
    stride = 2 * -(-count // 20)
    boundaries = [*range(stride, count, stride), count]
    segments = sublayer_segments(count, list(variants))
    OpenStreamPass(segments, boundaries, Substitutes(variants))(model)
    save_graph(model, directory / GRAPH_FILE, write_weights(model, directory))
    states = [list(segment.branches) for segment in segments]
    return {"boundaries": boundaries, "states": states if variants else [*states, ["keep"]]}


def build(verifier: str, directory: Path, precisions: Sequence[QuantisedState] = ()) -> None:
    """Write the search graph of a checkpoint or bundle, and what is to know of it, to the existing `directory`.

    Args:
        precisions: states that sublayers can be in besides being kept or skipped.

    Raises:
        ExportError, BundleError: nothing usable at `verifier`, or weights that are quantised already and `precisions`.
    """
    description: dict[str, Any]
    if (Path(verifier) / MANIFEST).is_file():
        bundle = load_bundle(verifier)
        if (kept := bundle.manifest["verifier"]["kv"]["dtype"]) != "float32":
            raise ExportError(
                f"{verifier} has activations in {kept}, and masks are searched with activations in float32: give the "
                "checkpoint, or a bundle in fp32, int8 or int4; a mask fits every precision of its checkpoint"
            )
        manifest = bundle.manifest
        model = load_graph(bundle.file(manifest["verifier"]["graph"]))
        limit = bundle.max_seq_len
        UnroutePass()(model)
        description = {
            "model": manifest["model"],
            "precision": bundle.precision,
            "max_seq_len": limit,
            "kv": manifest["verifier"]["kv"],
            "tokenizer": manifest["tokenizer"],
            "tokenizer_file": str((bundle.path / TOKENIZER_FILE).resolve()),
        }
        variants = _variants(verifier, bundle.precision, model, precisions, manifest["verifier"]["vocab_size"], limit)
        description |= write_search_graph(model, directory, variants)
    else:
        with open_checkpoint(verifier) as source:
            limit = capacity(None, source.config)
            lower(source.model, source.config, limit)
            description = {
                "model": source.identity.to_json(),
                "precision": source.precision or "fp32",
                "max_seq_len": limit,
                "kv": describe_kv(source.model),
                "tokenizer": export_tokenizer(source.directory, directory, source.config),
                "tokenizer_file": str(directory / TOKENIZER_FILE),
            }
            precision = description["precision"]
            variants = _variants(verifier, precision, source.model, precisions, source.config["vocab_size"], limit)
            description |= write_search_graph(source.model, directory, variants)
    write_json(directory / DESCRIPTION_FILE, description)


def _variants(
    verifier: str,
    precision: str,
    model: ir.Model,
    precisions: Sequence[QuantisedState],
    vocab_size: int,
    max_seq_len: int,
) -> dict[str, ir.Model]:
    """The decoder `model` with its weights in each of `precisions`, as an export quantises them."""
    if precisions and precision != "fp32":
        raise ExportError(
            f"the weights in {verifier} are {precision}, and states {', '.join(precisions)} are searched from weights "
            "in fp32: give the checkpoint, or a bundle in fp32; or allow the states keep and skip only"
        )
    num_layers = len(find_sublayers(model.graph)) // 2
    return quantised_copies(model, precisions, num_layers, vocab_size, max_seq_len) if precisions else {}


def main() -> int:
    """`python -m via_sd.tools.search.graph VERIFIER DIRECTORY [int8] [int4]`: build in a process of its own, whose
    memory (torch, the checkpoint) is gone when the search runs.
    """
    verifier, directory, *precisions = sys.argv[1:]
    try:
        build(verifier, Path(directory), [state for state in QUANTISED_STATES if state in precisions])
    except ViaSdError as error:
        sys.stderr.write(str(error))
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
