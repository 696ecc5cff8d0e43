"""Decoders as the ONNX Runtime GenAI model builder lays them out, made from checkpoints without that package."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from via_sd.export.passes import AttentionSemanticsPass, QuantizePass, constant_products
from via_sd.export.sources.checkpoint import open_checkpoint

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
HEAD = "lm_head.MatMul.weight"


def write_genai(
    directory: Path,
    checkpoint: Path,
    *,
    bits: int | None = None,
    change: Callable[[ir.Model], None] = lambda _: None,
    describe: Callable[[dict[str, Any]], None] = lambda _: None,
) -> Path:
    """Write the model in `checkpoint` to `directory` as the builder would.

    Args:
        bits: quantise the weights to so many bits; float32 if None.
        change: changes the graph before it is saved.
        describe: changes `genai_config.json` before it is saved.
    """
    with open_checkpoint(checkpoint) as source:
        model, config = source.model, source.config
        AttentionSemanticsPass(config, config["max_position_embeddings"])(model)
        _dress(model.graph)
        tied = _untie(model.graph)
        if bits is not None:
            QuantizePass(bits, only=list(constant_products(model.graph)))(model)  # an embedding stays in float32
        if tied:
            _read_from_head(model.graph, bits)
        change(model)
        directory.mkdir(parents=True)
        ir.save(model, directory / "model.onnx", external_data="model.onnx.data")
        for name in TOKENIZER_FILES:
            if (checkpoint / name).is_file():
                shutil.copyfile(checkpoint / name, directory / name)
        heads = config["num_attention_heads"]
        described = {
            "model": {
                "bos_token_id": config.get("bos_token_id"),
                "context_length": config["max_position_embeddings"],
                "decoder": {
                    "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                    "filename": "model.onnx",
                    "head_size": config.get("head_dim") or config["hidden_size"] // heads,
                    "hidden_size": config["hidden_size"],
                    "inputs": {
                        "input_ids": "input_ids",
                        "attention_mask": "attention_mask",
                        "past_key_names": "past_key_values.%d.key",
                        "past_value_names": "past_key_values.%d.value",
                    },
                    "outputs": {
                        "logits": "logits",
                        "present_key_names": "present.%d.key",
                        "present_value_names": "present.%d.value",
                    },
                    "num_attention_heads": heads,
                    "num_hidden_layers": config["num_hidden_layers"],
                    "num_key_value_heads": config["num_key_value_heads"],
                },
                "eos_token_id": config["eos_token_id"],
                "type": config["model_type"],
                "vocab_size": config["vocab_size"],
            },
            "search": {"max_length": config["max_position_embeddings"], "past_present_share_buffer": True},
        }
        describe(described)
        (directory / "genai_config.json").write_text(json.dumps(described), encoding="utf-8")
    return directory


def _dress(graph: ir.Graph) -> None:
    """The builder's opset, norms, shapes, names of dimensions, and its bounded caches of windowed layers."""
    graph.opset_imports[""] = 22
    for node in list(graph):
        if node.op_type == "RMSNormalization":
            node.op_type = "SimplifiedLayerNormalization"
            node.attributes["stash_type"] = ir.AttrInt64("stash_type", 1)
        if node.op_type == "GroupQueryAttention":
            heads, kv_heads = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads"))
            packed = heads + (2 * kv_heads if node.inputs[1] is None else 0)
            width = packed * node.inputs[3].shape[3]
            node.inputs[0].type = ir.TensorType(ir.DataType.FLOAT)
            node.inputs[0].shape = ir.Shape(["batch_size", "sequence_length", width])
        if node.op_type == "GroupQueryAttention" and node.attributes["local_window_size"].as_int() > 0:
            node.attributes["sliding_window_cache"] = ir.AttrInt64("sliding_window_cache", 1)
    for value in [*graph.inputs, *graph.outputs]:
        if value.name != "logits" and len(value.shape) == 4:
            length = "past_sequence_length" if value.is_graph_input() else "total_sequence_length"
            value.shape = ir.Shape(["batch_size", value.shape[1], length, "kv_cache_dim"])
    last = [node for node in graph if node.op_type == "SkipSimplifiedLayerNormalization"][-1]
    attributes = {name: attribute.value for name, attribute in last.attributes.items()}
    final = ir.node(last.op_type, last.inputs, attributes, domain=last.domain, name="final_norm")
    final.outputs[0].name, final.outputs[0].type = "normed", last.outputs[0].type
    ir.convenience.replace_nodes_and_values(graph, last, [last], [final], [last.outputs[0]], [final.outputs[0]])


def _untie(graph: ir.Graph) -> bool:
    """Give a head that transposes the embedding's table one of its own, [hidden, vocab]; whether it was so."""
    turned = next((node for node in graph if node.op_type == "Transpose"), None)
    if turned is None:
        return False
    table = turned.inputs[0].const_value.numpy().T.copy()
    head = ir.Value(
        name=HEAD,
        const_value=ir.tensor(table, name=HEAD),
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=ir.Shape(table.shape),
    )
    graph.register_initializer(head)
    turned.outputs[0].replace_all_uses_with(head)
    graph.remove(turned, safe=True)
    return True


def _read_from_head(graph: ir.Graph, bits: int | None) -> None:
    """Let the embedding read the head's table: through `Transpose`, or through `Reshape` when it is quantised."""
    gather = next(node for node in graph if node.op_type == "Gather" and node.inputs[1].name == "input_ids")
    embedding = gather.inputs[0]
    if bits is None:
        rows = ir.node("Transpose", [graph.initializers[HEAD]], {"perm": [1, 0]}, name="embed_transpose")
        nodes = [rows]
        lookup = ir.node("Gather", [rows.outputs[0], gather.inputs[1]], name="embed_gather")
    else:
        blocks, scales = graph.initializers[f"{HEAD}.q{bits}"], graph.initializers[f"{HEAD}.q{bits}.scales"]
        wanted = np.array([blocks.shape[0], blocks.shape[1] * blocks.shape[2]])
        shape = ir.node("Constant", [], {"value": ir.tensor(wanted)}, name="embed_shape")
        rows = ir.node("Reshape", [blocks, shape.outputs[0]], name="embed_reshape")
        lookup = ir.node(
            "GatherBlockQuantized",
            [rows.outputs[0], gather.inputs[1], scales],
            {"bits": bits, "block_size": 32, "gather_axis": 0, "quantize_axis": 1},
            domain="com.microsoft",
            name="embed_gather",
        )
        nodes = [shape, rows]
    for node in (*nodes, lookup):
        node.outputs[0].name = f"{node.name}_out"
    lookup.outputs[0].type = gather.outputs[0].type
    ir.convenience.replace_nodes_and_values(
        graph, gather, [gather], [*nodes, lookup], [gather.outputs[0]], [lookup.outputs[0]]
    )
    del graph.initializers[embedding.name]
