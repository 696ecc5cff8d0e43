"""A real model, SmolLM2-135M-Instruct, from its GGUF file and from a Hugging Face directory, against transformers."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from via_sd.errors import DownloadError
from via_sd.export import export_bundle
from via_sd.export.passes.lower import lower
from via_sd.export.sources.checkpoint import open_checkpoint
from via_sd.export.sources.gguf.model import gguf_to_directory
from via_sd.masks import Mask, ModelIdentity
from via_sd.runtime import Pipeline, load_bundle
from via_sd.runtime.engines.backends import open_engines
from via_sd.tools.bench.prompts import Prompt, read_prompts
from via_sd.tools.demo.smollm2 import fetch_smollm2

LAYERS = 30
CAPACITY = 512
#: Adjacent and scattered layers, first and last ones, and single sublayers.
SLIM = Mask.from_flags(
    tuple(layer not in (0, 6, 7, 8, 15, 22, 29) for layer in range(LAYERS)),
    tuple(layer not in (1, 6, 7, 8, 15, 21, 29) for layer in range(LAYERS)),
)
EXACT = ("plain", "speculative", "cascade")
PROMPTS = Path(__file__).parents[2] / "prompts.jsonl"
#: Prefill, steps of five at an offset, single steps.
STEPS = (40, 5, 5, 1, 1, 1, 5)


@pytest.fixture(scope="module")
def gguf() -> Path:
    try:
        return fetch_smollm2()
    except DownloadError as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class FromGguf:
    """What the GGUF file gives: a Hugging Face directory, and the plain decoder graph (no mask, so no branch)."""

    directory: Path
    identity: ModelIdentity
    graph: Path


@pytest.fixture(scope="module")
def from_gguf(gguf, module_workshop) -> FromGguf:
    """Reads the file once, which takes a while, and makes sure that the libraries print nothing meanwhile."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed), open_checkpoint(gguf) as checkpoint:
        lower(checkpoint.model, checkpoint.config, CAPACITY)
        graph = module_workshop.save(checkpoint.model, "plain")
    assert printed.getvalue() == ""
    directory = module_workshop.root / "checkpoint"
    gguf_to_directory(gguf, directory)
    return FromGguf(directory, checkpoint.identity, graph)


@pytest.fixture(scope="module")
def bundle(from_gguf, tmp_path_factory) -> Iterator[Path]:
    """Exported from the Hugging Face directory, with the mask."""
    path = tmp_path_factory.mktemp("smollm2") / "bundle"
    yield export_bundle(from_gguf.directory, path, masks=[SLIM], max_seq_len=CAPACITY)
    shutil.rmtree(path)  # half a gigabyte


@pytest.fixture(scope="module")
def pipeline(bundle) -> Pipeline:
    return Pipeline.load(bundle, max_sequences=1)


@pytest.fixture(scope="module")
def reference(from_gguf) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(from_gguf.directory, dtype=torch.float32).eval()
    model.generation_config = transformers.GenerationConfig()  # no end-of-sequence token: it generates to the length
    return model


@pytest.fixture(scope="module")
def text_tokens(pipeline) -> list[int]:
    return pipeline.encode(read_prompts(PROMPTS)[0].text)[: sum(STEPS)]


def test_logits_equal_transformers_in_every_kind_of_step(bundle, reference, text_tokens, open_graph):
    with torch.no_grad():
        wanted = reference(torch.tensor([text_tokens])).logits[0].numpy()
    found = open_graph(bundle / "verifier/model.onnx", CAPACITY).feed_in(STEPS, text_tokens)
    assert np.abs(found - wanted).max() < 1e-3
    assert json.loads((bundle / "bundle.json").read_text())["check"]["max_abs_difference"] < 1e-3


def test_one_graph_is_the_full_and_the_slim_verifier_bit_for_bit(bundle, from_gguf, text_tokens, open_graph):
    routed = open_graph(bundle / "verifier/model.onnx", CAPACITY)
    plain = open_graph(from_gguf.graph, CAPACITY)
    assert np.array_equal(routed.feed_in(STEPS, text_tokens), plain.feed_in(STEPS, text_tokens))
    keep = json.loads((bundle / "bundle.json").read_text())["verifier"]["tiers"]["slim"]["keep"]
    slim = open_graph(bundle / "verifier/slim.onnx", CAPACITY)
    routed.rewind()
    skipped = [buffer for name, buffer in routed.kv.items() if name not in slim.kv]
    for buffer in skipped:
        buffer.fill(3.5)
    assert np.array_equal(routed.feed_in(STEPS, text_tokens, keep), slim.feed_in(STEPS, text_tokens))
    assert len(skipped) == 2 * SLIM.keep_attention.count(False)
    assert all((buffer == 3.5).all() for buffer in skipped)


def test_the_gguf_file_and_the_directory_made_from_it_give_the_same_weights(bundle, from_gguf):
    manifest = json.loads((bundle / "bundle.json").read_text())
    assert manifest["model"] == from_gguf.identity.to_json()
    weights = (from_gguf.graph.parent / "weights.data").read_bytes()
    assert manifest["files"]["verifier/weights.data"]["sha256"] == hashlib.sha256(weights).hexdigest()


def test_slim_and_manifest_are_under_a_megabyte(bundle):
    assert sum((bundle / name).stat().st_size for name in ("verifier/slim.onnx", "bundle.json")) < 1_000_000


@pytest.fixture(scope="module")
def fp16_bundle(from_gguf, tmp_path_factory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("smollm2") / "fp16"
    yield export_bundle(from_gguf.directory, path, masks=[SLIM], precision="fp16", max_seq_len=CAPACITY)
    shutil.rmtree(path)


def test_in_float16_logits_are_within_two_hundredths_and_exact_modes_write_one_text(bundle, fp16_bundle, text_tokens):
    half = Pipeline.load(fp16_bundle, max_sequences=1)
    found, wanted = (
        open_engines(load_bundle(path), device="cpu")[0].new_buffers().forward("full", text_tokens, 0, len(text_tokens))
        for path in (fp16_bundle, bundle)
    )
    logits, of_float32 = (np.stack([row.logits for row in rows]) for rows in (found, wanted))
    assert np.abs(logits - of_float32).max() <= 2e-2 * np.abs(of_float32).max()
    assert np.sqrt(np.square(logits - of_float32).mean()) <= 3e-2
    size, whole = ((path / "verifier/weights.data").stat().st_size for path in (fp16_bundle, bundle))
    assert size < 0.51 * whole
    for bucket in ("copy", "code", "chat"):
        text = next(p for p in read_prompts(PROMPTS) if p.bucket == bucket).text
        greedy = [half.generate(text, mode=mode, max_new_tokens=32, temperature=0.0).token_ids for mode in EXACT]
        assert greedy[1:] == greedy[:1] * (len(EXACT) - 1)


@pytest.mark.parametrize("bucket", ["copy", "code", "chat"])
def test_greedy_text_is_transformers_greedy_text(bucket, pipeline, reference):
    """One prompt of each kind here, all of them at length in the long test."""
    check_greedy(pipeline, reference, next(p for p in read_prompts(PROMPTS) if p.bucket == bucket), 48)


@pytest.mark.long
@pytest.mark.parametrize("number", range(12))
def test_greedy_text_is_transformers_greedy_text_at_length(number, pipeline, reference):
    check_greedy(pipeline, reference, read_prompts(PROMPTS)[number], 128)


def check_greedy(pipeline: Pipeline, reference: transformers.PreTrainedModel, prompt: Prompt, length: int) -> None:
    """Every exact mode gives transformers' tokens; where one differs, transformers' own choice there was a tie.

    A tie: its two best logits closer than 1e-3, which a step of another size may order the other way.
    """
    ids = pipeline.encode(prompt.text)
    wanted, margins = greedy(reference, ids, length)
    for mode in ("plain", "speculative", "cascade"):
        found = pipeline.generate(prompt.text, mode=mode, max_new_tokens=length, ignore_eos=True).token_ids
        assert len(found) == len(wanted) == length
        first = next((i for i in range(length) if found[i] != wanted[i]), None)
        if first is not None:
            where = f"{mode} leaves transformers at token {first} of {prompt.text[:40]!r}, margin {margins[first]:.2g}"
            print(where)
            assert margins[first] < 1e-3, f"{where}: no tie"


def greedy(model: transformers.PreTrainedModel, ids: list[int], length: int) -> tuple[list[int], list[float]]:
    """Greedy tokens by transformers' own generation with its cache, and how far each was ahead of the next best."""
    result = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=length,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = [row[0].topk(2).values for row in result.logits]
    return result.sequences[0, len(ids) :].tolist(), [float(a - b) for a, b in best]


def test_fetching_again_uses_the_file_that_is_there(gguf):
    before = gguf.stat().st_mtime_ns
    assert fetch_smollm2() == gguf
    assert gguf.stat().st_mtime_ns == before
    assert hashlib.sha256(gguf.read_bytes()).hexdigest().startswith("b179c9523d0e6a0f")
