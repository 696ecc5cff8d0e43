"""Small checkpoints of every architecture that is read from GGUF, with a tokenizer such files can hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tiny import write_tokenizer


@pytest.fixture(scope="session")
def gguf_checkpoint(new_checkpoint, tmp_path_factory) -> Callable[[str], Path]:
    """The checkpoint of a family with a byte-level BPE tokenizer that has merges and a chat template."""
    root = tmp_path_factory.mktemp("for-gguf")

    def build(family: str) -> Path:
        directory = root / family
        if not directory.exists():
            # No key has the scale of a query: readers of such files take that of the head.
            new_checkpoint(directory, family, **({"query_pre_attn_scalar": 16} if family.startswith("gemma") else {}))
            write_tokenizer(directory)
        return directory

    return build
