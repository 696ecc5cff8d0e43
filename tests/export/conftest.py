"""Small checkpoints of many families with random weights, and sessions over the graphs made from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.shared import SharedFolder
from via_sd.contract.graphs import step_arrays
from via_sd.export.passes.lower import lower
from via_sd.export.sources.checkpoint import Checkpoint, open_checkpoint
from via_sd.export.sources.reference import load_reference
from via_sd.export.writer import check
from via_sd.export.writer.weights import save_graph, write_weights

WINDOW = 32
CAPACITY = 128
VOCABULARY = 320
LAYERS = 4

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
#: Family -> (configuration class, what differs from `_SHAPE`).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-untied": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama-yarn": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": _YARN}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True, "head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "granite": (
        "GraniteConfig",
        {
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "logits_scaling": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "phi3-window": ("Phi3Config", {"sliding_window": WINDOW}),
    "smollm3": ("SmolLM3Config", {}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": WINDOW}),
    "stablelm": ("StableLmConfig", {"num_attention_heads": 2, "num_key_value_heads": 1, "partial_rotary_factor": 0.5}),
    "nemotron": ("NemotronConfig", {"head_dim": 32, "partial_rotary_factor": 0.5}),
    "glm": ("GlmConfig", {"head_dim": 32, "partial_rotary_factor": 0.5}),
    "glm4": ("Glm4Config", {"head_dim": 32, "partial_rotary_factor": 0.5}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16}),
    "seed-oss": ("SeedOssConfig", {"head_dim": 16}),
    "arcee": ("ArceeConfig", {}),
    "olmo": ("OlmoConfig", {}),
    "ministral": ("MinistralConfig", {"head_dim": 16, "sliding_window": WINDOW}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": ("Qwen3MoeConfig", {**_EXPERTS, "head_dim": 32, "moe_intermediate_size": 64, "norm_topk_prob": True}),
    "olmoe": ("OlmoeConfig", _EXPERTS),
    "granite-moe": ("GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "hunyuan": ("HunYuanDenseV1Config", {"head_dim": 16}),
    "olmo2": ("Olmo2Config", {}),
    "cohere": ("CohereConfig", {}),
    "phi": ("PhiConfig", {}),
}


def build_tokenizer(*, extra: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: one token per byte, then the special tokens, then `extra` ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>", *extra])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token=None
    )


def build_checkpoint(directory: Path, family: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """Save a random-weight model of `family` with a tokenizer; every norm and matrix is far from its initial value."""
    kind, differing = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**{**_SHAPE, **differing, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
        else:
            parameter.data *= 4
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory


@dataclass
class Session:
    """An ONNX Runtime session over a decoder graph, with KV buffers of its own that are updated in place."""

    session: ort.InferenceSession
    capacity: int
    past: int = 0
    kv: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        for name, value in self.inputs.items():
            if name.startswith("past_key_values."):
                self.kv[name] = np.zeros((1, value.shape[1], self.capacity, value.shape[3]), np.float32)

    def feed(self, tokens: Sequence[int], keep: Sequence[bool] | None = None, rows: int | None = None) -> np.ndarray:
        """Feed tokens behind what was fed; logits [rows, vocab] of the last `rows` of them (all by default)."""
        count = len(tokens)
        binding = self.session.io_binding()
        feeds: dict[str, np.ndarray] = {
            **step_arrays(np.array(tokens), self.past, count if rows is None else rows),
        }
        if "keep" in self.inputs:
            shape = self.inputs["keep"].shape
            feeds["keep"] = np.ones(shape, bool) if keep is None else np.array(keep, bool)
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for name, buffer in self.kv.items():
            present = name.replace("past_key_values", "present")
            binding.bind_input(name, "cpu", 0, np.float32, buffer.shape, buffer.ctypes.data)
            binding.bind_output(present, "cpu", 0, np.float32, buffer.shape, buffer.ctypes.data)
        binding.bind_output("logits", "cpu")
        self.session.run_with_iobinding(binding)
        self.past += count
        logits: np.ndarray = binding.get_outputs()[-1].numpy()[0]
        return logits

    def feed_in(self, steps: Sequence[int], tokens: Sequence[int], keep: Sequence[bool] | None = None) -> np.ndarray:
        """Feed `tokens` in steps of the given sizes; logits of every position."""
        assert sum(steps) == len(tokens)
        rows, start = [], 0
        for size in steps:
            rows.append(self.feed(tokens[start : start + size], keep))
            start += size
        return np.concatenate(rows)

    def rewind(self) -> None:
        self.past = 0
        for buffer in self.kv.values():
            buffer.fill(0)


def open_session(path: Path, capacity: int = CAPACITY) -> Session:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return Session(ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]), capacity)


@dataclass(frozen=True)
class Workshop:
    """Turns models into sessions, each graph in a folder of its own."""

    root: Path

    def save(self, model: ir.Model, name: str) -> Path:
        """Save a copy of `model` as a graph with a weights file beside it."""
        directory = self.root / name
        directory.mkdir(parents=True)
        copy = model.clone()
        save_graph(copy, directory / "model.onnx", write_weights(copy, directory))
        return directory / "model.onnx"

    def open(self, model: ir.Model, name: str, capacity: int = CAPACITY) -> Session:
        return open_session(self.save(model, name), capacity)

    def reopen(self, name: str, capacity: int = CAPACITY) -> Session:
        """A session over a graph saved before."""
        return open_session(self.root / name / "model.onnx", capacity)


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path / "graphs")


@pytest.fixture(scope="session")
def open_graph() -> Callable[..., Session]:
    """`open_session`: a session over a graph file."""
    return open_session


@pytest.fixture(scope="module")
def module_workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("graphs"))


@pytest.fixture(scope="session")
def checkpoint_of(shared: SharedFolder) -> Callable[[str], Path]:
    """A checkpoint of a family, built once."""
    return lambda family: shared.make(family, lambda directory: build_checkpoint(directory, family))


@pytest.fixture(scope="session")
def new_checkpoint() -> Callable[..., Path]:
    """`build_checkpoint`, for models that differ from their family."""
    return build_checkpoint


@pytest.fixture(scope="session")
def new_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return build_tokenizer


@pytest.fixture(scope="session")
def lowered(checkpoint_of: Callable[[str], Path]) -> Callable[[str], Checkpoint]:
    """A family's checkpoint with its graph lowered; the graph is shared between tests, so clone it to change it."""
    made: dict[str, Checkpoint] = {}

    def build(family: str) -> Checkpoint:
        if family not in made:
            with open_checkpoint(checkpoint_of(family)) as checkpoint:
                lower(checkpoint.model, checkpoint.config, CAPACITY)
                made[family] = checkpoint
        return made[family]

    return build


@pytest.fixture(scope="session")
def llama_reference(checkpoint_of: Callable[[str], Path], lowered: Callable[[str], Checkpoint]) -> check.Reference:
    """What transformers computes for a text of random tokens."""
    return check.reference_logits(lambda: load_reference(checkpoint_of("llama")), CAPACITY, lowered("llama").config)


@pytest.fixture(scope="session")
def reference() -> Callable[..., np.ndarray]:
    """Logits [tokens, vocab] by transformers in float32 of the checkpoint in a directory, sublayers skipped by hand."""
    return reference_logits


def reference_logits(
    directory: Path,
    tokens: Sequence[int],
    *,
    skip_attention: Sequence[int] = (),
    skip_mlp: Sequence[int] = (),
    move: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType({}),
) -> np.ndarray:
    """What the fixture `reference` gives; `move` changes the stream before a layer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )

    def silence(module: Any, inputs: Any, output: Any) -> Any:
        """A sublayer that is skipped adds nothing to the residual stream."""
        return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)

    for index in skip_attention:
        model.model.layers[index].self_attn.register_forward_hook(silence)
    for index in skip_mlp:
        layer = model.model.layers[index]
        (layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe).register_forward_hook(silence)
    for index, moved in move.items():
        model.model.layers[index].register_forward_pre_hook(
            lambda _, inputs, moved=moved: (moved(inputs[0]), *inputs[1:])
        )
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
    return logits


@pytest.fixture(scope="session")
def random_tokens() -> Callable[[int], list[int]]:
    def draw(count: int) -> list[int]:
        return [int(t) for t in np.random.default_rng(7).integers(0, 256, count)]

    return draw


@pytest.fixture
def read_json() -> Callable[[Path], Any]:
    return lambda path: json.loads(path.read_text(encoding="utf-8"))
