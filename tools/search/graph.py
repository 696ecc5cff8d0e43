"""The graph the mask search runs: every sublayer behind its own flag, and the residual stream open at its boundaries.

A decoder graph goes in (one that `export_bundle` would write, from a checkpoint or out of a bundle), an open graph
comes out: a candidate that shares its first sublayers with one that ran before starts from the stream that one left.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import onnx_ir as ir

from via_sd.contract.manifest import MANIFEST, TOKENIZER_FILE
from via_sd.errors import ViaSdError
from via_sd.export.passes import OpenStreamPass, find_sublayers, sublayer_segments
from via_sd.export.passes.lower import lower
from via_sd.export.portable.unroute import UnroutePass
from via_sd.export.sources.checkpoint import open_checkpoint
from via_sd.export.writer.describe import describe_kv
from via_sd.export.writer.limits import capacity
from via_sd.export.writer.tokenizer import export_tokenizer
from via_sd.export.writer.weights import load_graph, save_graph, write_weights
from via_sd.files import write_json
from via_sd.runtime import load_bundle
from via_sd.tools.search.session import DESCRIPTION_FILE, GRAPH_FILE, REFUSED


def write_search_graph(model: ir.Model, directory: Path) -> list[int]:
    """Turn the decoder graph `model`, in place, into the search's and write it with its weights to `directory`.

    Returns:
        The boundaries that can be read: about ten, and the end of the last sublayer.
    """
    count = len(find_sublayers(model.graph))
    stride = 2 * -(-count // 20)
    boundaries = [*range(stride, count, stride), count]
    OpenStreamPass(sublayer_segments(count), boundaries)(model)
    save_graph(model, directory / GRAPH_FILE, write_weights(model, directory))
    return boundaries


def build(verifier: str, directory: Path) -> None:
    """Write the search graph of a checkpoint or bundle, and what is to know of it, to the existing `directory`.

    Raises:
        ExportError, BundleError: nothing usable at `verifier`.
    """
    description: dict[str, Any]
    if (Path(verifier) / MANIFEST).is_file():
        bundle = load_bundle(verifier)
        manifest = bundle.manifest
        model = load_graph(bundle.file(manifest["verifier"]["graph"]))
        UnroutePass()(model)
        description = {
            "model": manifest["model"],
            "precision": bundle.precision,
            "max_seq_len": bundle.max_seq_len,
            "kv": manifest["verifier"]["kv"],
            "tokenizer": manifest["tokenizer"],
            "tokenizer_file": str((bundle.path / TOKENIZER_FILE).resolve()),
        }
        description["boundaries"] = write_search_graph(model, directory)
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
            description["boundaries"] = write_search_graph(source.model, directory)
    write_json(directory / DESCRIPTION_FILE, description)


def main() -> int:
    """`python -m via_sd.tools.search.graph VERIFIER DIRECTORY`: build in a process of its own, whose memory (torch,
    the checkpoint) is gone when the search runs.
    """
    verifier, directory = sys.argv[1:]
    try:
        build(verifier, Path(directory))
    except ViaSdError as error:
        sys.stderr.write(str(error))
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
