"""The graph the mask search runs: every sublayer behind its own flag, and the residual stream open at its boundaries.

A decoder graph goes in (one that `export_bundle` would write, from a checkpoint or out of a bundle). Skipping a
sublayer hands the stream through, so a candidate that shares its first sublayers with one that ran before starts from
the stream that one left behind: all flags up to there are false, and `hidden` takes the place of the embedding.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import onnx_ir as ir

from via_sd.contract.manifest import MANIFEST, TOKENIZER_FILE
from via_sd.errors import ViaSdError
from via_sd.export.passes import RoutePass, find_sublayers, sublayer_segments
from via_sd.export.passes.lower import lower
from via_sd.export.portable.unroute import UnroutePass
from via_sd.export.sources.checkpoint import open_checkpoint
from via_sd.export.writer.describe import describe_kv
from via_sd.export.writer.limits import capacity
from via_sd.export.writer.tokenizer import export_tokenizer
from via_sd.export.writer.weights import load_graph, save_graph, write_weights
from via_sd.files import write_json
from via_sd.runtime import load_bundle
from via_sd.tools.search.session import DESCRIPTION_FILE, GRAPH_FILE, HIDDEN, REFUSED, RESUME, boundary_output


class OpenStreamPass(ir.passes.InPlacePass):
    """Route every sublayer, and give the residual stream an entry besides the embedding and exits at `boundaries`.

    Requires: a decoder graph `find_sublayers` understands, not yet routed; boundaries from 2 on.
    Ensures: input `keep` as `RoutePass` makes it, one flag per sublayer; inputs `resume` bool[1] and `hidden`
    float[batch, sequence_len, hidden]: with `resume` the stream starts as `hidden` instead of the embedding of
    `input_ids`; an output `hidden_<b>` for each boundary b, the stream before sublayer b (after the last one for b =
    number of sublayers).
    """

    def __init__(self, boundaries: list[int]) -> None:
        super().__init__()
        self.boundaries = boundaries

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        sublayers = find_sublayers(graph)
        embedding = sublayers[0].before.residual
        RoutePass(sublayer_segments(len(sublayers)))(model)
        segments = [node for node in graph if node.op_type == "If"]
        for boundary in self.boundaries:
            delta, residual = segments[boundary - 1].outputs[:2]
            stream = _node("Add", [residual, delta], boundary_output(boundary), embedding)
            graph.insert_after(segments[boundary - 1], stream)
            graph.outputs.append(stream.outputs[0])
        _open_entry(graph, embedding)
        return ir.passes.PassResult(model, modified=True)


def _open_entry(graph: ir.Graph, embedding: ir.Value) -> None:
    users = list(embedding.uses())
    resume = ir.Value(name=RESUME, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([1]))
    width = embedding.shape[-1] if embedding.shape is not None else None
    hidden = ir.Value(name=HIDDEN, type=embedding.type, shape=ir.Shape(["batch", "resumed_len", width]))
    graph.inputs.extend([resume, hidden])
    given = _node("Identity", [hidden], "given_stream", embedding)
    embedded = _node("Identity", [embedding], "embedded_stream", embedding)
    entry = _node("If", [resume], "entry_stream", embedding)
    entry.attributes["then_branch"] = ir.AttrGraph(
        "then_branch", ir.Graph([], given.outputs, nodes=[given], name="resumed")
    )
    entry.attributes["else_branch"] = ir.AttrGraph(
        "else_branch", ir.Graph([], embedded.outputs, nodes=[embedded], name="from_embedding")
    )
    producer = embedding.producer()
    assert producer is not None
    graph.insert_after(producer, entry)
    for user, index in users:
        user.replace_input_with(index, entry.outputs[0])


def _node(op_type: str, inputs: list[ir.Value], name: str, like: ir.Value) -> ir.Node:
    """A node with one output that has its name, and the type and shape of `like`."""
    node = ir.node(op_type, inputs, name=name)
    node.outputs[0].name = name
    node.outputs[0].type, node.outputs[0].shape = like.type, like.shape
    return node


def write_search_graph(model: ir.Model, directory: Path) -> list[int]:
    """Turn the decoder graph `model`, in place, into the search's and write it with its weights to `directory`.

    Returns:
        The boundaries that can be read: about ten, and the end of the last sublayer.
    """
    count = len(find_sublayers(model.graph))
    stride = 2 * -(-count // 20)
    boundaries = [*range(stride, count, stride), count]
    OpenStreamPass(boundaries)(model)
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
