"""Engines of a real model, SmolLM2-135M-Instruct: full, two slim-verifiers and a drafter (built; no GPU needed)."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import transformers

from tests.support.portable_session import PortableSession, open_portable
from tests.support.segments import build_segment, cut_before
from via_sd.errors import DownloadError
from via_sd.export import export_bundle
from via_sd.export.portable import to_portable
from via_sd.export.sources.gguf.model import gguf_to_directory
from via_sd.export.tensorrt import build_engines
from via_sd.export.tensorrt.library import load_library
from via_sd.masks import Mask
from via_sd.tools.demo.smollm2 import fetch_smollm2

pytest.importorskip("tensorrt_rtx", reason="needs the tensorrt-rtx extra")
pytestmark = pytest.mark.engines

LAYERS, HIDDEN, VOCABULARY, CAPACITY = 30, 576, 49152, 4096
SLIM_SKIPS = (3, 6, 7, 10, 12, 13, 15, 16, 18, 20, 22, 25, 27)
DEEP_SKIPS = (*SLIM_SKIPS, 4, 8, 9, 21, 23)
MASKS = [
    Mask.from_layers([layer not in skips for layer in range(LAYERS)], name=name)
    for name, skips in (("slim", SLIM_SKIPS), ("deep", DEEP_SKIPS))
]
ENGINES = ("full", "slim", "deep", "drafter")
#: Prefill, five tokens at an offset, single tokens, five more.
STEPS = (40, 5, 1, 1, 5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Iterator[Path]:
    try:
        gguf = fetch_smollm2()
    except DownloadError as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("smollm2") / "checkpoint"
    directory.mkdir()
    gguf_to_directory(gguf, directory)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def drafter(checkpoint, tmp_path_factory) -> Path:
    """A drafter with the verifier's vocabulary: its outer layers (it need not draft well to be built)."""
    directory = tmp_path_factory.mktemp("drafter") / "checkpoint"
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.model.layers = torch.nn.ModuleList([model.model.layers[i] for i in (0, 1, 2, 27, 28, 29)])
    model.config.num_hidden_layers = len(model.model.layers)
    model.config.layer_types = None
    model.save_pretrained(directory)
    for file in checkpoint.glob("tokenizer*"):
        shutil.copy(file, directory)
    return directory


@pytest.fixture(scope="module")
def bundle(checkpoint, drafter, tmp_path_factory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("bundle") / "bundle"
    yield export_bundle(checkpoint, path, masks=MASKS, drafter=str(drafter), max_seq_len=CAPACITY, check=False)
    shutil.rmtree(path)  # half a gigabyte


@pytest.fixture(scope="module", params=["fp16", "bf16"])
def engines(bundle, request) -> Path:
    """The folder of freshly built engines."""
    start = perf_counter()
    result = build_engines(bundle, dtype=request.param)
    sizes = {name: result.manifest["files"][f"{name}.plan"]["size"] / 1e6 for name in ENGINES}
    print(
        f"\n{request.param}, {perf_counter() - start:.1f} s in all: "
        + ", ".join(f"{name} {sizes[name]:.1f} MB in {result.built[name]:.1f} s" for name in ENGINES)
        + f"; plans {sum(sizes.values()):.1f} MB, "
        + f"weights {result.manifest['files']['weights.data']['size'] / 1e6:.1f} MB"
    )
    return result.path


def test_four_plans_are_under_forty_megabytes(engines):
    assert sum((engines / f"{name}.plan").stat().st_size for name in ENGINES) < 40_000_000


def test_the_weights_file_holds_each_tensor_once_and_little_else(engines):
    manifest = json.loads((engines / "engines.json").read_text())
    listed = manifest["weights"]["tensors"]
    tensors = listed["verifier"]
    data = (engines / "weights.data").read_bytes()
    spans = {(t["offset"], t["size"]) for model in listed.values() for t in model}
    contents = {hashlib.sha256(data[offset : offset + size]).digest() for offset, size in spans}
    assert len(contents) == len(spans)
    # Five matrices and two norms a layer, the last norm, two rotary tables, and one table for embedding and head.
    assert len(tensors) == LAYERS * 7 + 1 + 2 + 1
    tables = [t for t in tensors if VOCABULARY in t["shape"]]
    assert [t["shape"] for t in tables] == [[HIDDEN, VOCABULARY]]
    parameters = 134_515_008
    rotary = 2 * CAPACITY * 32
    assert sum(t["size"] for t in tensors) == 2 * (parameters + rotary)
    assert len(data) < 1.005 * sum(size for _, size in spans)
    for name in ("slim", "deep"):
        assert set(manifest["engines"][name]["weights"]) < set(manifest["engines"]["full"]["weights"])


def test_no_plan_carries_weights(engines):
    for name in ENGINES:
        constants = re.findall(r"Total Weights Memory: (\d+) bytes", (engines / "build.log").read_text())
        assert len(constants) == len(ENGINES)
        assert all(int(size) < 100_000 for size in constants), name


def test_a_step_moves_no_weight_and_copies_the_cache_for_kv_heads_only(engines):
    """What a step does is listed in the plan, kernel by kernel; a weight in another layout would be a copy in each."""
    for name in ENGINES:
        plan = (engines / f"{name}.plan").read_bytes()
        calls = [
            (k.decode(), x.decode()) for k, x in re.findall(rb"function=\{ name=(\w+) .*?input_args=\{ (.*?) \}", plan)
        ]
        assert [kernel for kernel, inputs in calls if '"model.' in inputs]
        assert not [call for call in calls if '"model.' in call[1] and call[0] in ("__myl_Tran", "__myl_Move")]
        assert [kernel for kernel, _ in calls if "mha" in kernel]  # attention is one kernel
        assert not [kernel for kernel, _ in calls if "Repl" in kernel]
    scratch = re.findall(r"Total Activation Memory: (\d+) bytes", (engines / "build.log").read_text())
    assert all(int(size) < 40_000_000 for size in scratch)


def test_the_portable_graph_equals_transformers(bundle, checkpoint, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    portable = to_portable(ir.load(bundle / "verifier/model.onnx"), max_seq_len=CAPACITY)
    for batch in (1, 2):
        tokens = np.random.default_rng(batch).integers(0, VOCABULARY, (batch, sum(STEPS)))
        with torch.no_grad():
            wanted = model(torch.from_numpy(tokens)).logits.numpy()
        found = open_portable(portable, tmp_path / f"{batch}" / "model.onnx", batch).feed_in(STEPS, tokens)
        print(f"\nbatch {batch}: max abs difference {np.abs(found - wanted).max():.2g}")
        assert np.abs(found - wanted).max() < 1e-3


def test_an_engine_per_run_of_layers_adds_up_to_one_engine_with_its_weights(bundle):
    """The alternative, should weights as inputs turn out slow; first and last segment each hold a tied table."""
    library = load_library("tensorrt-rtx")
    model = to_portable(ir.load(bundle / "verifier/model.onnx"), max_seq_len=CAPACITY, dtype="fp16")
    whole = len(build_segment(library, model))
    parts = [len(build_segment(library, part)) for part in cut_before(model, (10, 20), HIDDEN)]
    shown = ", ".join(f"{size / 1e6:.1f}" for size in parts)
    print(f"\none engine {whole / 1e6:.1f} MB; three segments {shown}: {sum(parts) / 1e6:.1f} MB")
    assert len(parts) == 3
    assert whole > 2 * 134_515_008
    table = 2 * HIDDEN * VOCABULARY
    assert abs(sum(parts) - table - whole) < 0.02 * whole


def test_the_half_precision_graph_beside_the_engines_runs_and_says_nearly_the_same(engines, bundle, tmp_path):
    if engines_dtype(engines) == "bf16":
        pytest.skip("ONNX Runtime's CPU provider has no bfloat16 kernels")
    tokens = np.random.default_rng(5).integers(0, VOCABULARY, (1, sum(STEPS)))
    exact = open_portable(
        to_portable(ir.load(bundle / "verifier/model.onnx"), max_seq_len=CAPACITY), tmp_path / "m.onnx"
    )
    half = PortableSession(ort.InferenceSession(engines / "full.onnx", providers=["CPUExecutionProvider"]), 1)
    wanted, found = (log_softmax(s.feed_in(STEPS, tokens)[0]) for s in (exact, half))
    divergence = float((np.exp(wanted) * (wanted - found)).sum(-1).mean())
    print(
        f"\nfp16 against fp32: {divergence:.2g} nats, same token {(found.argmax(-1) == wanted.argmax(-1)).mean():.1%}"
    )
    assert divergence < 1e-3


def engines_dtype(folder: Path) -> str:
    return str(json.loads((folder / "engines.json").read_text())["request"]["dtype"])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
