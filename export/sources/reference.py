"""The checkpoint in transformers, which everything exported is held to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def hidden_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def load_reference(checkpoint: Path) -> Any:
    """The model of the Hugging Face directory `checkpoint` in transformers: float32, eager attention."""
    import torch
    from transformers import AutoModelForCausalLM

    with hidden_progress_bars():
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")


def reference_of(config: Any, tensors: Mapping[str, Any]) -> Any:
    """The model that `config` (of transformers) describes, with weights `tensors`: float32, eager attention."""
    import torch
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with hidden_progress_bars():
        return kind.from_pretrained(
            None,
            config=config,
            state_dict={name: tensor.float() for name, tensor in tensors.items()},
            dtype=torch.float32,
            attn_implementation="eager",
        )
