"""Numbers of every row of logits, computed in the graph: all that greedy decoding and the router look at.

A row of logits is as wide as the vocabulary, and these are four numbers: next to nothing has to leave a device.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from via_sd.contract.graphs import ARGMAX, CANDIDATES, GAP, MARGIN, ROW_LOGITS, ROW_NUMBERS, SUM_EXP
from via_sd.errors import UnsupportedModelError
from via_sd.export.passes.values import find_output, new_value, shape_of
from via_sd.export.portable.constants import add, int64_constant, named_constant

#: Stands for the best logit where the best of the others is looked for.
_LEAST = -1e30
#: A token id is exact in float32 below this.
_MOST_TOKENS = 1 << 24


class RowNumbersPass(ir.passes.InPlacePass):
    """Add the numbers that the router's decisions (paper Algorithm 2) are made of.

    Of a row l, and the token v that `candidates` names for it:

    - the first token with the largest logit. A comparison says which, not `ArgMax`, for TensorRT does not promise which
      of several equals its own takes, and in half precision they are frequent;
    - sum exp(l - max l), which is 1 over the largest probability;
    - l[v] - max l, the logarithm of q(v) / max q;
    - max l less the largest logit of the other tokens.

    Requires: output `logits` float32 [batch, rows, vocab], of known vocab.
    Ensures: input `candidates` int64 [batch, rows]; output `row_numbers` float32 [batch, rows, 4] behind `logits`.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        logits = find_output(graph, ROW_LOGITS.name)
        assert logits is not None
        vocabulary = logits.shape[-1] if logits.shape is not None else None
        if not isinstance(vocabulary, int) or vocabulary > _MOST_TOKENS:
            raise UnsupportedModelError(f"the graph has logits over {vocabulary} tokens, wanted at most {_MOST_TOKENS}")
        candidates = new_value(CANDIDATES)
        graph.inputs.append(candidates)
        nodes: list[ir.Node] = []
        last = int64_constant(graph, [-1])

        def constant(value: float) -> ir.Value:
            return named_constant(graph, f"float32_{value:g}", np.array(value, np.float32))

        def reduce(op_type: str, value: ir.Value, name: str) -> ir.Value:
            return add(nodes, op_type, [value, last], name, keepdims=1)

        below = add(nodes, "Sub", [logits, reduce("ReduceMax", logits, "row_peak")], "row_below_peak")
        mass = reduce("ReduceSum", add(nodes, "Exp", [below], "row_weights"), "row_mass")
        tokens = add(nodes, "Range", [constant(0), constant(vocabulary), constant(1)], "row_tokens")
        at_peak = add(nodes, "GreaterOrEqual", [below, constant(0)], "row_at_peak")
        equals = add(nodes, "Where", [at_peak, tokens, constant(vocabulary)], "row_equals")
        best = reduce("ReduceMin", equals, "row_best")
        column = add(nodes, "Unsqueeze", [candidates, last], "row_candidate")
        gap = add(nodes, "GatherElements", [below, column], "row_gap", axis=-1)
        is_best = add(nodes, "Equal", [tokens, best], "row_is_best")
        others = add(nodes, "Where", [is_best, constant(_LEAST), below], "row_others")
        margin = add(nodes, "Neg", [reduce("ReduceMax", others, "row_second")], "row_margin")
        columns = {ARGMAX: best, SUM_EXP: mass, GAP: gap, MARGIN: margin}
        numbers = add(nodes, "Concat", [columns[i] for i in sorted(columns)], ROW_NUMBERS.name, axis=-1)
        numbers.type, numbers.shape = ir.TensorType(ir.DataType.FLOAT), shape_of(ROW_NUMBERS)
        graph.extend(nodes)
        graph.outputs.insert(list(graph.outputs).index(logits) + 1, numbers)
        return ir.passes.PassResult(model, modified=True)
