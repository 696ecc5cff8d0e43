"""From a verifier to something that evaluates masks: search graph, scoring text, full distributions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from via_sd.errors import SearchError
from via_sd.files import read_json, scratch_directory
from via_sd.masks import (
    DEFAULT_ALPHA,
    DEFAULT_BETA,
    DEFAULT_OBJECTIVE,
    DistributionEvaluator,
    ModelIdentity,
    QuantisedState,
    objective_by_name,
)
from via_sd.progress import Progress, no_progress
from via_sd.tools.search.masked_text import MaskedText
from via_sd.tools.search.session import DESCRIPTION_FILE, REFUSED, SearchSession
from via_sd.tools.search.text import ScoringText, continuations, encode_prompts, from_file, tokens_hash

#: Streams of recent candidates may take this share of the weights' size.
_CACHE_SHARE = 0.25


@dataclass(frozen=True)
class SearchModel:
    """A verifier loaded for a search.

    Attributes:
        session: what runs it.
        model: what masks call it by.
        precision: of its weights.
        max_seq_len: most tokens a text may have.
        weight_bytes: size of its weights.
        tokenizer, tokenizer_description: its tokenizer, and the manifest's entry for it.
    """

    session: SearchSession
    model: ModelIdentity
    precision: str
    max_seq_len: int
    weight_bytes: int
    tokenizer: Tokenizer
    tokenizer_description: dict[str, Any]


def load_search_model(
    verifier: str | Path, *, precisions: Sequence[QuantisedState] = (), threads: int | None = None
) -> SearchModel:
    """Load a verifier (Hugging Face directory, hub id, GGUF file, ONNX decoder) or a bundle for a search.

    Args:
        precisions: states that sublayers can be in besides being kept or skipped.

    Raises:
        SearchError: nothing usable at `verifier`, with the exporter's reason.
    """
    with scratch_directory("via-sd-search-") as directory:
        build_apart(str(verifier), directory, precisions)
        description = read_json(directory / DESCRIPTION_FILE)
        # Once loaded the session needs no file: the weights are mapped or packed.
        return SearchModel(
            session=SearchSession(
                directory, description["boundaries"], description["states"], description["kv"], threads=threads
            ),
            model=ModelIdentity.from_json(description["model"]),
            precision=description["precision"],
            max_seq_len=description["max_seq_len"],
            weight_bytes=sum(file.stat().st_size for file in directory.glob("weights*")),
            tokenizer=Tokenizer.from_file(description["tokenizer_file"]),
            tokenizer_description=description["tokenizer"],
        )


def build_apart(verifier: str, directory: Path, precisions: Sequence[QuantisedState] = ()) -> None:
    """Write the search graph to `directory` in a process of its own (see `via_sd.tools.search.graph`)."""
    command = [sys.executable, "-m", "via_sd.tools.search.graph", verifier, str(directory), *precisions]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        reason = built.stderr.strip() or f"building the search graph ended with exit code {built.returncode}"
        if built.returncode == REFUSED:
            raise SearchError(reason)
        last = reason.splitlines()[-1]
        hint = "; pip install 'via-sd-export[export]'" if last.startswith("ModuleNotFoundError") else ""
        raise SearchError(f"the search graph could not be built: {last}{hint}")


def greedy_texts(
    model: SearchModel, prompts: Sequence[str], window: int, progress: Progress = no_progress
) -> list[ScoringText]:
    """The verifier's own greedy answers to `prompts`, `window` tokens in all."""
    encoded = encode_prompts(model.tokenizer, model.tokenizer_description, prompts)
    room = model.max_seq_len - max(map(len, encoded))
    if room < 1:
        raise SearchError(f"a prompt has more than the {model.max_seq_len} tokens the model takes; shorten it")
    eos = frozenset(model.tokenizer_description["eos_token_ids"])
    return continuations(
        encoded,
        window,
        lambda prompt, limit: model.session.greedy(prompt, min(limit, room), eos),
        lambda share: progress("generating scoring text", share),
    )


def file_text(model: SearchModel, path: Path, window: int) -> list[ScoringText]:
    """The first `window` tokens of a text file."""
    return from_file(path, model.tokenizer, window, model.max_seq_len)


def open_evaluator(
    model: SearchModel,
    texts: Sequence[ScoringText],
    *,
    objective: str = DEFAULT_OBJECTIVE,
    alpha: float = DEFAULT_ALPHA,
    beta: float = DEFAULT_BETA,
    threads: int | None = None,
) -> DistributionEvaluator:
    """Evaluates masks of `model` on `texts`; runs the full model once, to have its distributions.

    Raises:
        SearchError: no such objective, or alpha or beta outside their domain.
    """
    try:
        function = objective_by_name(objective, alpha=alpha, beta=beta)
    except ValueError as error:
        raise SearchError(str(error)) from None
    identity = {
        "model": model.model.to_json(),
        "precision": model.precision,
        "objective": objective,
        "alpha": alpha,
        "beta": beta,
        "tokens": sum(text.scored for text in texts),
        "tokens_sha256": tokens_hash(texts),
    }
    masked = MaskedText(model.session, texts, cache_bytes=int(_CACHE_SHARE * model.weight_bytes))
    return DistributionEvaluator(masked, function, identity, threads=threads)
