"""Tokens of several sequences in one pass: every family computes what transformers computes for each alone."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from via_sd.errors import UnsupportedModelError
from via_sd.export.passes import PackTokensPass, UnpackTokensPass, gqa
from via_sd.export.writer.describe import describe_kv
from via_sd.runtime.engines.ort import OrtEngine
from via_sd.runtime.engines.protocol import Block

FAMILIES = (
    "llama", "llama-untied", "llama-yarn", "qwen2", "qwen3", "mistral", "granite", "phi3", "phi3-window", "smollm3",
    "gemma2", "gemma3",
)  # fmt: skip
#: Tokens of each of three sequences in each pass: prompts side by side, steps beside prompts, none, all beyond windows.
PASSES = ((40, 3, 0), (1, 1, 45), (5, 30, 1), (0, 7, 1), (1, 1, 1), (1, 0, 0), (12, 1, 4))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_batch_gives_the_logits_of_each_sequence_alone(family, lowered, checkpoint_of, reference, workshop):
    model = lowered(family).model
    description = {"kv": describe_kv(model), "vocab_size": 320}
    engine = OrtEngine(workshop.save(model, family), description, 128, threads=1, slots=3)
    texts = np.random.default_rng(3).integers(0, 256, (3, 64)).tolist()
    wanted = [reference(checkpoint_of(family), np.array(text)) for text in texts]
    assert min(rows.std() for rows in wanted) > 0.1  # logits that say something
    buffers = [engine.new_buffers() for _ in texts]
    past = [0, 0, 0]
    for counts in PASSES:
        taking_part = [i for i in (2, 0, 1) if counts[i]]  # in an order that is not that of the slots
        blocks = [
            Block(buffers[i], texts[i][past[i] : past[i] + counts[i]], past[i], max(1, counts[i] - 1))
            for i in taking_part
        ]
        for i, rows in zip(taking_part, engine.forward("full", blocks), strict=True):
            past[i] += counts[i]
            found = np.stack([row.logits for row in rows])
            assert np.abs(found - wanted[i][past[i] - len(found) : past[i]]).max() < 1e-4
    assert past == [sum(counts) for counts in zip(*PASSES, strict=True)]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_unpacking_undoes_packing(family, lowered):
    packed = lowered(family).model
    model = packed.clone()
    UnpackTokensPass()(model)
    names = {value.name for value in model.graph.inputs}
    assert names == {value.name for value in packed.graph.inputs} - {"query_lengths", "to_padded", "to_packed"}
    assert not [node for node in model.graph if node.op_type == "GatherND"]
    PackTokensPass()(model)
    signature = [(node.op_type, [value and value.name for value in node.inputs]) for node in packed.graph]
    again = [(node.op_type, [value and value.name for value in node.inputs]) for node in model.graph]
    assert sorted(again, key=str) == sorted(signature, key=str)


def test_a_graph_that_was_not_packed_cannot_be_unpacked(lowered):
    model = lowered("llama").model.clone()
    UnpackTokensPass()(model)
    with pytest.raises(UnsupportedModelError, match="tokens are not packed"):
        UnpackTokensPass()(model)


def test_attention_with_positions_of_its_own_is_refused(lowered):
    model = lowered("llama").model.clone()
    UnpackTokensPass()(model)
    (node, *_) = gqa.attentions(model.graph)
    node.replace_input_with(gqa.Input.POSITION_IDS, ir.Value(name="positions"))
    with pytest.raises(UnsupportedModelError, match="positions or a mask of its own"):
        PackTokensPass()(model)
