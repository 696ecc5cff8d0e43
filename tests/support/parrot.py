"""A tiny Llama that has learnt one passage by heart: real text with emoji and CJK, without a download.

It reads bytes, so every emoji is four tokens and every ideograph three, and nearly every chunk ends inside one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

PASSAGE = (
    "The crane 🦩 said: 你好, 世界! Then it said it again: 你好, 世界! "
    "And the fox 🦊 laughed, and the crane 🦩 laughed too.\n"
)
PROMPT = "The crane"
ANSWER = PASSAGE.removeprefix(PROMPT)
MAX_SEQ_LEN = 16384
LAYERS = 4
#: The layer that the slim-verifier skips.
SKIPPED = 2
#: A request for more steps than any test waits for.
LONG: dict[str, Any] = {"stream": True, "ignore_eos": True, "max_tokens": 16000}


def write_checkpoint(directory: Path) -> Path:
    """Trains it (about two seconds) and writes a Hugging Face directory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _byte_tokenizer()
    # Matrices this small gain nothing from threads, which on a busy machine wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=272,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_SEQ_LEN,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            tie_word_embeddings=True,
        )
    )
    tokens = torch.tensor([[*tokenizer(PASSAGE).input_ids, tokenizer.eos_token_id]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(400):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.01:
            break
    else:
        raise AssertionError(f"the passage was not learnt: loss {loss.item():.3f}")
    torch.set_num_threads(threads)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def write_bundle(checkpoint: Path, out: Path) -> Path:
    """Exports it with a slim-verifier that leaves out one layer."""
    from via_sd.export import export_bundle
    from via_sd.masks import Mask

    keep = tuple(layer != SKIPPED for layer in range(LAYERS))
    return export_bundle(checkpoint, out, masks=[Mask.from_flags(keep, keep)], max_seq_len=MAX_SEQ_LEN)


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    # A template that changes the text, so that its use shows: the fox is told, not the crane.
    fast.chat_template = "{% for m in messages %}And the fox{{ m['content'] }}{% endfor %}"
    return fast
