"""Step inputs: what a forward pass needs to say, and nothing it has to recompute.

An exporter derives the lengths that GroupQueryAttention wants from an attention mask, which would have to grow by one
entry per token; and it computes logits for every position. Here lengths and the number of logits become inputs.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from via_sd.contract.graphs import LAST_POSITION, LOGIT_ROWS, LOGITS, TOTAL_LENGTH
from via_sd.errors import UnsupportedModelError
from via_sd.export.passes import gqa
from via_sd.export.passes.values import find_input, find_output, new_value, shape_of

#: An input of a frontend's graph, which says how many tokens there are.
ATTENTION_MASK = "attention_mask"


class StepInputsPass(ir.passes.InPlacePass):
    """Replace `attention_mask` by lengths.

    Requires: every GroupQueryAttention reads its lengths from `attention_mask`.
    Ensures: inputs `last_position` int32[batch], the index of the step's last token (tokens known before it), and
    `total_length` int32[], the number of tokens in the KV cache after the step; no `attention_mask`.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        last, total = new_value(LAST_POSITION), new_value(TOTAL_LENGTH)
        attentions = gqa.attentions(graph)
        if not attentions:
            raise UnsupportedModelError(
                "the graph has no GroupQueryAttention: this model's attention has no in-place KV cache on this provider"
            )
        for node in attentions:
            node.replace_input_with(gqa.Input.LAST_POSITION, last)
            node.replace_input_with(gqa.Input.TOTAL_LENGTH, total)
        RemoveUnusedNodesPass()(model)
        mask = find_input(graph, ATTENTION_MASK)
        if mask is not None:
            if mask.uses():
                users = sorted({user.op_type for user in mask.consumers()})
                raise UnsupportedModelError(
                    f"the attention mask is also read by {', '.join(users)}: not a plain causal decoder"
                )
            graph.inputs.remove(mask)
        graph.inputs.extend([last, total])
        return ir.passes.PassResult(model, modified=True)


class LogitRowsPass(ir.passes.InPlacePass):
    """Compute logits for chosen tokens only, and fold a tied head's transpose away.

    Requires: `logits` is the LM head's product, possibly scaled or capped afterwards, one row per packed token.
    Ensures: input `logit_rows` int64[rows]; output `logits` float[1, rows, vocab]; a head that read
    `Transpose(weight)` reads `weight` itself (`transB`), so that embedding and head stay one tensor.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        head = find_head(graph)
        hidden = head.inputs[0]
        assert hidden is not None
        chosen = new_value(LOGIT_ROWS)
        graph.inputs.append(chosen)
        rows = ir.node("Gather", [hidden, chosen], {"axis": 1}, name="logit_hidden")
        rows.outputs[0].name = "logit_hidden"
        rows.outputs[0].type = hidden.type
        graph.insert_before(head, rows)
        head.replace_input_with(0, rows.outputs[0])

        weight = head.inputs[1]
        assert weight is not None
        transpose = weight.producer()
        if transpose is not None and transpose.op_type == "Transpose":
            fused = ir.node(
                "FusedMatMul",
                [rows.outputs[0], transpose.inputs[0]],
                {"transB": 1},
                domain="com.microsoft",
                name="lm_head",
            )
            ir.convenience.replace_nodes_and_values(graph, head, [head], [fused], [head.outputs[0]], [fused.outputs[0]])
            graph.opset_imports.setdefault("com.microsoft", 1)
        RemoveUnusedNodesPass()(model)
        logits = find_output(graph, LOGITS.name)
        assert logits is not None
        logits.shape = shape_of(LOGITS, vocab=_vocabulary(logits))
        return ir.passes.PassResult(model, modified=True)


def find_head(graph: ir.Graph) -> ir.Node:
    """The node that multiplies the last hidden state by the vocabulary."""
    logits = find_output(graph, LOGITS.name)
    node = logits.producer() if logits is not None else None
    while node is not None and node.op_type not in ("MatMul", "FusedMatMul", "MatMulNBits"):
        sources = [v.producer() for v in node.inputs if v is not None and v.producer() is not None]
        node = sources[0] if len(sources) == 1 else None
    if node is None:
        raise UnsupportedModelError("cannot find the LM head: `logits` does not come from a matrix product")
    return node


def _vocabulary(logits: ir.Value) -> int | None:
    assert logits.shape is not None
    size = logits.shape[-1]
    return size if isinstance(size, int) else None
