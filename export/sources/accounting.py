"""What a checkpoint's files hold against what its model has: every tensor is used, or named.

The model's class in transformers says which tensors there are and of which shapes. It is built without memory for its
weights, so the comparison costs a moment; it knows which tensors are stored under other names, or in parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.export.failures import one_message
from via_sd.export.sources.reference import hidden_progress_bars
from via_sd.export.sources.weight_files import WeightFiles


def check_accounts(directory: Path, weights: WeightFiles, config: Mapping[str, Any]) -> list[str]:
    """Compare the tensors in `weights` with those of the model that `directory` describes.

    Returns:
        Names of the tensors that the model is made of: all of them but a head that repeats the embedding.

    Raises:
        ExportError: tensors that are missing, left over or of another shape, or a head that differs from the embedding
            it is said to be.
        UnsupportedModelError: no causal language model of transformers.
    """
    import torch
    from transformers import AutoModelForCausalLM

    models: Any = AutoModelForCausalLM  # it says of itself what it returns, and not all of it
    with one_message(
        f"transformers cannot read {directory / 'config.json'} as a causal language model", UnsupportedModelError
    ):
        with hidden_progress_bars():
            model, report = models.from_pretrained(
                directory,
                device_map="meta",
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        tied = bool(getattr(model.config, "tie_word_embeddings", False))
        embedding = model.get_input_embeddings()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        embedded = names.get(id(embedding.weight))
    refuse_missing(directory, report["missing_keys"])
    refuse_surplus(directory, report["unexpected_keys"], str(config.get("model_type")))
    if report["mismatched_keys"]:
        name, stored, wanted = sorted(report["mismatched_keys"])[0]
        raise ExportError(
            f"{directory} has {name} of shape {list(stored)}, and its config.json asks for {list(wanted)} "
            f"({len(report['mismatched_keys'])} tensors differ); fetch the files that belong together"
        )
    head = "lm_head.weight"
    if not (tied and head in weights and embedded in weights):
        return list(weights)
    if not torch.equal(weights[head], weights[str(embedded)]):
        raise ExportError(
            f"{directory} has {head}, and its config.json says that head and embedding are one (tie_word_embeddings), "
            f"but {head} differs from {embedded}; correct the configuration"
        )
    return [name for name in weights if name != head]


def refuse_missing(source: Path, names: Iterable[str]) -> None:
    """Raise `ExportError` if the model has tensors, `names`, that `source` does not."""
    if missing := sorted(names, key=_natural):
        raise ExportError(
            f"{source} lacks weights for {_some(missing)}: without them the model is not the one it was; fetch or "
            "convert it again"
        )


def refuse_surplus(source: Path, names: Iterable[str], model_type: str) -> None:
    """Raise `ExportError` if `source` has tensors, `names`, that the model does not."""
    if surplus := sorted(names, key=_natural):
        raise ExportError(
            f"{source} has {_some(surplus)}, which a model of type {model_type} as configured does not have: it would "
            "be left out; correct the configuration, or give the checkpoint of a causal language model"
        )


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer 10 after layer 2."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
