"""Pipelines under test: the real one over a table engine, with any drafter, and with a view of its KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.support.table_engine import TableEngine
from via_sd.contract.graphs import FULL
from via_sd.runtime import Bundle, Pipeline
from via_sd.runtime.decoding.drafters import Draft, Drafter
from via_sd.runtime.decoding.passes import Passes
from via_sd.runtime.decoding.sampling import Processor
from via_sd.runtime.decoding.tiered_model import SequenceCaches, TieredModel
from via_sd.runtime.engines.protocol import Engine

LETTERS = "abcdefghijklmnopqrstuvwxyz"
NewDrafter = Callable[[SequenceCaches, Processor, int], Drafter]


class WatchedModel(TieredModel):
    """A model that remembers the KV of the sequence it decodes, and takes another drafter than its bundle's."""

    current: SequenceCaches
    replacement: NewDrafter | None = None

    @contextmanager
    def caches(self, prompt: Sequence[int], *, wait: bool = True) -> Iterator[SequenceCaches]:
        with super().caches(prompt, wait=wait) as caches:
            self.current = caches
            yield caches

    def new_drafter(self, caches: SequenceCaches, processor: Processor, seed: int) -> Drafter:
        if self.replacement is not None:
            return self.replacement(caches, processor, seed)
        return super().new_drafter(caches, processor, seed)


class WatchedPipeline(Pipeline):
    """A pipeline over a watched model."""

    model_class = WatchedModel
    model: WatchedModel

    @property
    def current(self) -> SequenceCaches:
        """KV of the sequence that began last."""
        return self.model.current

    @property
    def replacement(self) -> NewDrafter | None:
        """What drafts instead of the bundle's drafter."""
        return self.model.replacement

    @replacement.setter
    def replacement(self, new_drafter: NewDrafter | None) -> None:
        self.model.replacement = new_drafter


def table_pipeline(
    engine: TableEngine,
    directory: Path,
    *,
    draft_with: str | TableEngine = "ngram",
    tokenizer: Tokenizer | None = None,
    eos: Sequence[int] = (),
    slim: str | None = "slim",
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> WatchedPipeline:
    """The real pipeline over `engine`.

    Args:
        directory: where the tokenizer's file goes.
        draft_with: `ngram`, `mask` (the engine's deepest tier), or another engine, which becomes a `model` drafter.
        tokenizer: one token a letter if None.
        settings: of the model's generation_config.json.
        options: `max_sequences`, `retained_slots`, `slot_timeout`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (tokenizer or letters_tokenizer(engine.vocab_size)).save(str(directory / "tokenizer.json"))
    drafter: Engine | None = None
    described: dict[str, Any] = {"kind": draft_with}
    if draft_with == "mask":
        described["tier"] = engine.tiers[-1]
    elif not isinstance(draft_with, str):
        drafter, described = draft_with, {"kind": "model", "shared_vocab": engine.vocab_size}
    # What the masks skip matters to the runtime as a cost alone: they skip most, so slim passes are worth trying.
    kept = {"keep_attention": [True] + [False] * 4, "keep_mlp": [True] + [False] * 4}
    manifest = {
        "precision": "fp32",
        "verifier": {"tiers": {tier: {"mask": kept} if tier != FULL else {} for tier in engine.tiers}},
        "max_seq_len": engine.max_seq_len,
        "tokenizer": {"eos_token_ids": list(eos), "special_tokens": {}, "chat_template": None},
        "generation_config": dict(settings or {}),
        "slim": slim,
        "drafter": described,
        "files": {"tokenizer.json": {}},
    }
    # A slot that is never given back is an error here, not a test that hangs.
    limits = {"max_sequences": 8, "retained_slots": 2, "slot_timeout": 30, **options}
    return WatchedPipeline(Bundle(directory, manifest), engine, drafter, **limits)


def letters_tokenizer(vocab_size: int) -> Tokenizer:
    """One token a letter: `a` is 0, `b` is 1, …"""
    tokenizer = Tokenizer(models.WordLevel({LETTERS[i]: i for i in range(vocab_size)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    return tokenizer


class AdversarialDrafter:
    """Drafts blocks of random length whose tokens are right, wrong or random, as its own random stream decides.

    Args:
        right: the token that full would emit next, if the sequence is long enough to know; None otherwise.
        seed: of the random stream.
        sampled: draw each token from a random distribution and declare that distribution, as a model drafter does.
    """

    cost = 0.0
    seconds = 0.0
    calls = 0

    def __init__(
        self, vocab_size: int, right: Callable[[Sequence[int]], int | None], seed: int, *, sampled: bool = False
    ) -> None:
        self._vocab_size, self._right, self._sampled = vocab_size, right, sampled
        self._rng = np.random.default_rng(seed)

    def expectation(self, sequence: Sequence[int]) -> int:
        return 1

    def truncate(self, length: int) -> None:
        """It keeps nothing."""

    def propose(self, sequence: Sequence[int], limit: int) -> Passes[Draft]:
        yield from ()
        tokens: list[int] = []
        distributions: list[np.ndarray | None] = []
        # The block's length is chosen before any of its tokens is drawn.
        for _ in range(int(self._rng.integers(0, limit + 1))):
            if self._sampled:
                probabilities = self._rng.dirichlet(np.full(self._vocab_size, 0.5))
                tokens.append(int(self._rng.choice(self._vocab_size, p=probabilities)))
                distributions.append(probabilities)
                continue
            right = self._right([*sequence, *tokens])
            if right is None or self._rng.random() < 0.3:
                right = int(self._rng.integers(self._vocab_size))
            tokens.append(right)
            distributions.append(None)
        return Draft(tokens, distributions)


class ScriptedDrafter:
    """Proposes the given blocks, one a call, each cut to what may be drafted; nothing once they are used up."""

    cost = 0.0
    seconds = 0.0
    calls = 0

    def __init__(self, *blocks: Sequence[int]) -> None:
        self._blocks = list(blocks)

    def expectation(self, sequence: Sequence[int]) -> int:
        return 1

    def truncate(self, length: int) -> None:
        """It keeps nothing."""

    def propose(self, sequence: Sequence[int], limit: int) -> Passes[Draft]:
        yield from ()
        block = list(self._blocks.pop(0)[:limit]) if self._blocks else []
        return Draft(block, [None] * len(block))
