"""Another exporter's decoder graph: what of it can be taken, and how it is brought into the form ours have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedNodesPass

from via_sd.contract.graphs import INPUT_IDS, LOGITS, kv_names
from via_sd.errors import UnsupportedModelError
from via_sd.export.passes import SharedTablePass, find_sublayers, gqa
from via_sd.export.passes.attention_semantics import AttentionSemantics
from via_sd.export.passes.step_inputs import ATTENTION_MASK
from via_sd.export.passes.values import find_input, find_output
from via_sd.export.sources.source_graph import SourceGraph

ADVICE = (
    "export the model with the ONNX Runtime GenAI model builder for the CPU (fp32, int8 or int4), or give its Hugging "
    "Face checkpoint"
)
#: Older opsets have other forms of the operators that the passes insert.
_OLDEST_OPSET = 18
_QUANTISED = ("MatMulNBits", "GatherBlockQuantized")
_BITS = {4: "int4", 8: "int8"}
_OTHER_QUANTISATION = {
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "DynamicQuantizeMatMul",
    "MatMulBnb4",
    "MatMulFpQ4",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "QLinearMatMul",
}
_OTHER_ATTENTION = {
    "Attention",
    "LinearAttention",
    "MultiHeadAttention",
    "PagedAttention",
    "SparseAttention",
    "Softmax",
}
_OTHER_FLOATS = {ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16", ir.DataType.DOUBLE: "float64"}
_LENGTHS = (gqa.Input.LAST_POSITION, gqa.Input.TOTAL_LENGTH)
#: Inputs of an attention that a step does not have.
_UNKNOWN_INPUTS = (gqa.Input.POSITION_IDS, gqa.Input.ATTENTION_BIAS, gqa.Input.K_SCALE, gqa.Input.V_SCALE)
_WINDOW_CACHE = "sliding_window_cache"


@dataclass(frozen=True)
class Declared:
    """What is said of a graph beside it: names of its inputs and outputs (the KV buffers aside), and its head size."""

    input_ids: str = INPUT_IDS.name
    attention_mask: str = ATTENTION_MASK
    logits: str = LOGITS.name
    head_size: int | None = None


@dataclass(frozen=True)
class ForeignDecoder:
    """What was found in a graph that has been adopted.

    Attributes:
        precision: of its weights, when they are quantised: `int4` if any are, else `int8`; None for float32.
        source: how to run it as it came.
        attention: window, scale and soft cap of each layer, as the graph has them.
        sizes: `hidden_size`, `num_attention_heads`, `num_key_value_heads`, `head_dim`, `num_hidden_layers`,
            `vocab_size`, and `max_position_embeddings` where a rotary table limits it.
    """

    precision: str | None
    source: SourceGraph
    attention: list[AttentionSemantics]
    sizes: dict[str, int]


def adopt(file: Path, model: ir.Model, declared: Declared) -> ForeignDecoder:
    """Bring the graph in `file`, in place, into the form a checkpoint's has before it is lowered.

    Inputs and outputs afterwards: `input_ids`, KV buffers float32 [batch, heads, past, head size], `attention_mask` (if
    it had one); `logits`, KV buffers. They are called as in `via_sd.contract.graphs`. Embedding and head share a table.

    Raises:
        UnsupportedModelError: no float32 decoder over GroupQueryAttention, or one that a step cannot feed.
    """
    reader = _Reader(file, model.graph, declared)
    reader.check()
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    precision = reader.precision()
    semantics = reader.semantics()  # before the rotary tables and the window caches are touched
    source = reader.rename()
    SharedTablePass()(model)
    RemoveUnusedNodesPass()(model)
    return ForeignDecoder(precision, source, semantics, reader.sizes())


class _Reader:
    """A graph, its attentions in order of execution, and the file it came from."""

    def __init__(self, file: Path, graph: ir.Graph, declared: Declared) -> None:
        self.file = file
        self.graph = graph
        self.declared = declared
        self.attentions = gqa.attentions(graph)

    def refuse(self, found: str, wanted: str) -> NoReturn:
        raise UnsupportedModelError(f"{self.file} {found}; wanted {wanted}; {ADVICE}")

    def check(self) -> None:
        """Refuse what is no decoder in float32, from tokens and KV buffers to logits."""
        opset = self.graph.opset_imports.get("", 0)
        if opset < _OLDEST_OPSET:
            self.refuse(f"is of opset {opset}", f"opset {_OLDEST_OPSET} or newer")
        for value in [*self.graph.inputs, *self.graph.outputs, *self.graph.initializers.values()]:
            if value.dtype in _OTHER_FLOATS:
                self.refuse(
                    f"is {_OTHER_FLOATS[value.dtype]} ({value.name})",
                    "float32 activations and KV, with weights in float32, int8 or int4",
                )
        operators = {node.op_type for node in self.graph.all_nodes()}
        if not self.attentions:
            others = ", ".join(sorted(operators & _OTHER_ATTENTION)) or "none"
            self.refuse(
                f"has no GroupQueryAttention (attention it has: {others})",
                "one in every layer, over a KV cache that is updated in place",
            )
        if found := sorted(operators & _OTHER_QUANTISATION):
            self.refuse(f"is quantised with {', '.join(found)}", "float32 weights, or int4 or int8 in MatMulNBits")
        self._check_interface()
        for node in self.attentions:
            self._check_attention(node)
        mask = self._input(self.declared.attention_mask)
        if mask is not None:
            self._check_mask(mask)

    def _check_interface(self) -> None:
        past = {past for node in self.attentions for past, _ in gqa.kv_buffers(node)}
        known = (self.declared.input_ids, self.declared.attention_mask)
        foreign = [str(v.name) for v in self.graph.inputs if v not in past and v.name not in known]
        tokens = self._input(self.declared.input_ids)
        if foreign or tokens is None:
            found = f"takes {', '.join(foreign)}" if foreign else f"takes no {self.declared.input_ids}"
            self.refuse(found, f"no inputs but {' and '.join(known)} and KV buffers")
        if tokens is not None and tokens.dtype != ir.DataType.INT64:
            self.refuse(f"takes tokens as {tokens.dtype}", "int64")
        logits = find_output(self.graph, self.declared.logits)
        if logits is None or logits.shape is None or not isinstance(logits.shape[-1], int):
            self.refuse(f"has no output {self.declared.logits} of known width", "logits over the vocabulary")
        elif logits.shape[1] == 1:
            self.refuse("has logits of the last position only (prune_lm_head)", "those of every position of a step")

    def _check_attention(self, node: ir.Node) -> None:
        extra = [index.name.lower() for index in _UNKNOWN_INPUTS if gqa.given(node, index) is not None]
        if extra:
            self.refuse(f"gives its attention {', '.join(extra)}", "lengths, KV buffers and rotary tables")
        if gqa.number(node, "causal", 1) != 1:
            self.refuse("has attention that is not causal", "a decoder")
        for past, present in gqa.kv_buffers(node):
            if past is None or not past.is_graph_input() or len(past.uses()) != 1 or not present.is_graph_output():
                name = "none" if past is None else past.name
                self.refuse(f"has a KV cache ({name}) that attention does not have to itself", "an input and an output")
            elif past.dtype != ir.DataType.FLOAT:
                self.refuse(f"has a KV cache of {past.dtype} ({past.name})", "float32")

    def _check_mask(self, mask: ir.Value) -> None:
        """The mask may say how many tokens there are, and nothing else."""
        seen, stack = {mask}, [mask]
        while stack:
            for node, index in stack.pop().uses():
                if node.op_type == gqa.OP_TYPE and index in _LENGTHS:
                    continue
                if node.op_type == gqa.OP_TYPE or any(v.is_graph_output() for v in node.outputs):
                    self.refuse(
                        f"uses {mask.name} for more than lengths (input {index} of {node.op_type})",
                        "a mask that only says how many tokens there are",
                    )
                stack.extend(value for value in node.outputs if value not in seen)
                seen.update(node.outputs)

    def precision(self) -> str | None:
        """Precision of the quantised weights, None where there are none."""
        bits = {gqa.number(node, "bits", 4) for node in self.graph.all_nodes() if node.op_type in _QUANTISED}
        if bits - set(_BITS):
            self.refuse(f"has weights in {', '.join(f'{b:g}' for b in sorted(bits))} bits", "4 or 8")
        return _BITS[int(min(bits))] if bits else None

    def semantics(self) -> list[AttentionSemantics]:
        """What each attention says of itself; a scale it leaves to the operator is 1 / sqrt(head size)."""
        default = 1.0 / math.sqrt(self._head_size())
        return [
            AttentionSemantics(
                int(gqa.number(node, "local_window_size", -1)),
                gqa.number(node, "scale", 0.0) or default,
                gqa.number(node, "softcap", 0.0),
            )
            for node in self.attentions
        ]

    def rename(self) -> SourceGraph:
        """Give inputs and outputs our names and shapes, in our order; returns how to run the graph as it came."""
        heads, size = self._kv_heads(), self._head_size()
        tokens, mask = self._input(self.declared.input_ids), self._input(self.declared.attention_mask)
        logits = find_output(self.graph, self.declared.logits)
        assert tokens is not None
        assert logits is not None
        kv: list[tuple[ir.Value, ir.Value]] = []
        window = 0
        for node in self.attentions:
            for past, present in gqa.kv_buffers(node):
                assert past is not None
                kv.append((past, present))
            # Our buffers hold every position, so nothing is ever evicted.
            cache = node.attributes.pop(_WINDOW_CACHE, None)
            if cache is not None and cache.as_int():
                window = max(window, int(gqa.number(node, "local_window_size", 0)))
        source = SourceGraph(
            self.file,
            self.declared.input_ids,
            None if mask is None else self.declared.attention_mask,
            self.declared.logits,
            tuple((str(past.name), str(present.name)) for past, present in kv),
            (heads, size),
            window,
        )
        tokens.name, tokens.shape = INPUT_IDS.name, ir.Shape(["batch", "sequence_len"])
        logits.name = LOGITS.name
        names = [pair for layer in range(len(self.attentions)) for pair in kv_names(layer)]
        for (before, after), (past_name, present_name) in zip(kv, names, strict=True):
            before.name, after.name = past_name, present_name
            before.shape = ir.Shape(["batch", heads, "past_sequence_len", size])
            after.shape = ir.Shape(["batch", heads, "total_sequence_len", size])
        self.graph.inputs.clear()
        self.graph.inputs.extend([tokens, *(past for past, _ in kv)])
        if mask is not None:
            mask.name = ATTENTION_MASK
            self.graph.inputs.append(mask)
        self.graph.outputs.clear()
        self.graph.outputs.extend([logits, *(present for _, present in kv)])
        return source

    def sizes(self) -> dict[str, int]:
        first = find_sublayers(self.graph)[0].norm
        weight, entry = first.inputs[1], first.inputs[0]
        assert entry is not None
        if weight is None or weight.shape is None or not isinstance(weight.shape[0], int):
            self.refuse("has a first norm without a weight", "one as wide as the hidden state")
        entry.shape = ir.Shape(["batch", "sequence_len", weight.shape[0]])
        logits = self.graph.outputs[0]
        assert logits.shape is not None
        found = {
            "hidden_size": weight.shape[0],
            "num_hidden_layers": len(self.attentions),
            "num_attention_heads": int(gqa.number(self.attentions[0], "num_heads", 0)),
            "num_key_value_heads": self._kv_heads(),
            "head_dim": self._head_size(),
            "vocab_size": _known(logits.shape[-1]),
        }
        tables = [gqa.given(node, gqa.Input.COS) for node in self.attentions if gqa.number(node, "do_rotary", 0)]
        rows = [table.shape[0] for table in tables if table is not None and table.shape is not None]
        if limits := [row for row in rows if isinstance(row, int)]:
            found["max_position_embeddings"] = min(limits)
        return found

    def _input(self, name: str) -> ir.Value | None:
        return find_input(self.graph, name)

    def _kv_heads(self) -> int:
        counts = {int(gqa.number(node, "kv_num_heads", 0)) for node in self.attentions}
        if len(counts) != 1:
            self.refuse(f"has layers with {sorted(counts)} KV heads", "the same in every layer")
        return counts.pop()

    def _head_size(self) -> int:
        """From the KV buffers, the width of the query (or of query, key and value), or what is declared."""
        sizes = set()
        kv_heads = self._kv_heads()
        for node in self.attentions:
            past, query = gqa.given(node, gqa.Input.PAST_KEY), gqa.given(node, gqa.Input.QUERY)
            size = past.shape[3] if past is not None and past.shape is not None else None
            if not isinstance(size, int):
                width = query.shape[-1] if query is not None and query.shape is not None else None
                packed = 0 if gqa.given(node, gqa.Input.KEY) is not None else 2 * kv_heads
                size = self.declared.head_size
                if isinstance(width, int):
                    size = width // (int(gqa.number(node, "num_heads", 1)) + packed)
            sizes.add(size)
        if len(sizes) != 1 or None in sizes:
            found = ", ".join(map(str, sorted(size for size in sizes if size is not None))) or "unknown"
            self.refuse(f"has attention heads of size {found}", "one size that is known, the same in every layer")
        return int(sizes.pop() or 0)


def _known(dimension: int | ir.SymbolicDim) -> int:
    assert isinstance(dimension, int)  # it was checked
    return dimension
