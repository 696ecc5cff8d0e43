"""The text a search scores masks on: tokens, and from where on they count."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from via_sd.errors import SearchError
from via_sd.runtime.generation.chat import render_chat

#: Tokens that are scored: the window tau of the paper, section 2.4.
DEFAULT_WINDOW = 1000


@dataclass(frozen=True)
class ScoringText:
    """One sequence: tokens from `start` on are scored, those before are a prompt, which full always reads itself."""

    tokens: tuple[int, ...]
    start: int = 0

    @property
    def scored(self) -> int:
        return len(self.tokens) - self.start


def tokens_hash(texts: Sequence[ScoringText]) -> str:
    """SHA-256 over lengths, starts and tokens of `texts`."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(np.array([len(text.tokens), text.start, *text.tokens], "<i8").tobytes())
    return digest.hexdigest()


def encode_prompts(tokenizer: Any, description: dict[str, Any], prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of `prompts`, each through the chat template in `description` (a manifest's `tokenizer`), if any."""
    template = description["chat_template"]
    if template is None:
        return [list(tokenizer.encode(prompt, add_special_tokens=True).ids) for prompt in prompts]
    special = description["special_tokens"]
    texts = [render_chat(template, [{"role": "user", "content": prompt}], special) for prompt in prompts]
    return [list(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]


def continuations(
    prompts: Sequence[Sequence[int]],
    window: int,
    continue_greedily: Callable[[Sequence[int], int], list[int]],
    progress: Callable[[float], None] = lambda _: None,
) -> list[ScoringText]:
    """The verifier's own greedy continuations of `prompts`, `window` tokens in all, shared out evenly.

    Args:
        continue_greedily: (prompt, most tokens) -> the tokens that follow, end-of-sequence excluded.
        progress: called with the share done.

    Raises:
        SearchError: the verifier has nothing to say to any of the prompts.
    """
    texts: list[ScoringText] = []
    missing = window
    for index, prompt in enumerate(prompts):
        # What an answer that ended early left over goes to the prompts that follow.
        share = -(-missing // (len(prompts) - index))
        answer = continue_greedily(prompt, share) if share else []
        if answer:
            texts.append(ScoringText((*prompt, *answer), len(prompt)))
            missing -= len(answer)
        progress((index + 1) / len(prompts))
    if not texts:
        raise SearchError("the verifier ends its answer at once for every prompt; give it other prompts")
    return texts


def from_file(path: Path, tokenizer: Any, window: int, max_seq_len: int) -> list[ScoringText]:
    """The first `window` tokens of a text file, in pieces of at most `max_seq_len`; all of them are scored.

    Raises:
        SearchError: no text there.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SearchError(f"cannot read text {path}: {error}") from None
    tokens = tokenizer.encode(text, add_special_tokens=True).ids[:window]
    if not tokens:
        raise SearchError(f"{path} has no text")
    return [ScoringText(tuple(tokens[i : i + max_seq_len])) for i in range(0, len(tokens), max_seq_len)]
