"""Tiny random-weight Llama checkpoints and their bundles: everything real but the training.

The verifier's weights are scaled until its distributions are about as sharp as a trained model's, and the sublayers its
masks skip are made nearly redundant, so that drafter, slim and full agree often and differ often enough to matter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAYERS = 6
HIDDEN = 64
MAX_SEQ_LEN = 256
EOS = "<|endoftext|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (EOS, TURN_START, TURN_END)
MERGES = ("t h", "th e", "Ġ the", "i n", "Ġ a", "e r", "o n", "in g", "Ġ o", "Ġo f")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Sublayers (layer, "attention" or "mlp") the slim mask skips: a whole layer, and single sublayers next to kept ones.
SLIM_SKIPS = ((1, "mlp"), (2, "attention"), (3, "attention"), (3, "mlp"))
#: What the deeper mask of the `mask` drafter skips on top of that.
DEEP_SKIPS = ((1, "attention"), (2, "mlp"), (4, "mlp"))
#: Scale of the output projections of skipped sublayers: what slim, or the deep mask, misses.
SLIM_EPSILON, DEEP_EPSILON = 0.25, 0.3


def write_tokenizer(directory: Path) -> int:
    """Write a byte-level BPE tokenizer (every byte, a few merges, three special tokens); returns its size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pairs = [(merge.split(" ")[0], merge.split(" ")[1]) for merge in MERGES]
    for left, right in pairs:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": EOS,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return int(tokenizer.get_vocab_size())


def write_verifier(directory: Path, *, seed: int = 0) -> Path:
    """Write the verifier's checkpoint: 6 layers, untied head, grouped-query attention, two end-of-sequence ids."""
    import torch

    size = write_tokenizer(directory)
    model = _llama(size, LAYERS, seed)
    with torch.no_grad():
        for skips, epsilon in ((SLIM_SKIPS, SLIM_EPSILON), (DEEP_SKIPS, DEEP_EPSILON)):
            for layer, sublayer in skips:
                block = model.model.layers[layer]
                output = block.self_attn.o_proj if sublayer == "attention" else block.mlp.down_proj
                output.weight.mul_(epsilon)
    return _save(model, directory, size)


def write_drafter(directory: Path, verifier: Path, *, padding: int = 12, noise: float = 0.1) -> Path:
    """Write a smaller model for `verifier` (a checkpoint of `write_verifier`): its outer layers, a little perturbed.

    `padding` rows of embedding and head stand behind the last real token, as many published models have them; their
    logits are large, so that a runtime which does not mask them drafts tokens that do not exist.
    """
    import torch
    from transformers import AutoModelForCausalLM

    size = write_tokenizer(directory)
    source = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32)
    model = _llama(size + padding, 3, seed=7)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for target, layer in zip(model.model.layers, (0, 4, 5), strict=True):
            target.load_state_dict(source.model.layers[layer].state_dict())
            for weight in target.parameters():
                weight.mul_(1 + noise * torch.randn(weight.shape, generator=generator))
        model.model.norm.load_state_dict(source.model.norm.state_dict())
        model.model.embed_tokens.weight[:size] = source.model.embed_tokens.weight
        model.lm_head.weight[:size] = source.lm_head.weight
        model.lm_head.weight[size:] *= 20
    return _save(model, directory, size)


def write_masks(directory: Path) -> tuple[Path, Path]:
    """Write the slim mask and the deeper one nested in it; returns their files (`slim.json`, `deep.json`)."""
    from via_sd.masks import Mask, write_mask

    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for name, skips in (("slim", SLIM_SKIPS), ("deep", SLIM_SKIPS + DEEP_SKIPS)):
        keep = {part: tuple((layer, part) not in skips for layer in range(LAYERS)) for part in ("attention", "mlp")}
        files.append(directory / f"{name}.json")
        write_mask(Mask.from_flags(keep["attention"], keep["mlp"]), files[-1])
    return files[0], files[1]


def write_bundle(checkpoint: Path, out: Path, mask: Path, drafter: str) -> Path:
    """Export `checkpoint` in fp32 with a slim mask, for sequences of `MAX_SEQ_LEN` tokens."""
    from via_sd.export import export_bundle

    return export_bundle(checkpoint, out, masks=[mask], drafter=drafter, max_seq_len=MAX_SEQ_LEN)


def _llama(vocab_size: int, layers: int, seed: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        attention_bias=False,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(10)
        model.lm_head.weight.mul_(7)
        # The tokenizer's first 94 ids are printable ASCII; bytes that are no text of their own become rare.
        model.lm_head.weight[94:256] *= 0.5
    return model


def _save(model: Any, directory: Path, size: int) -> Path:
    from transformers import GenerationConfig

    eos, turn_end = size - len(SPECIAL_TOKENS), size - 1
    model.config.eos_token_id = turn_end
    model.generation_config = GenerationConfig(eos_token_id=[turn_end, eos], pad_token_id=eos)
    model.save_pretrained(directory, safe_serialization=True)
    return directory
