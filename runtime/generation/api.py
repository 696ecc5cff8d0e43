"""Generation in one call: load a bundle, generate, stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from via_sd.runtime.generation.completion import Completion
from via_sd.runtime.generation.pipeline import Pipeline
from via_sd.runtime.generation.prompts import Prompt
from via_sd.runtime.generation.stream import CompletionStream

load = Pipeline.load


def generate(bundle: Pipeline | str | Path, prompt: Prompt, **options: Any) -> Completion:
    """Generate to the end; see `Pipeline.generate`.

    Args:
        bundle: a loaded pipeline, or a bundle directory, which is loaded for this call alone.
        options: fields of `GenerationConfig` and of `PromptOptions` by name.
    """
    return _loaded(bundle).generate(prompt, **options)


def stream(bundle: Pipeline | str | Path, prompt: Prompt, **options: Any) -> CompletionStream:
    """Generate chunk by chunk; see `Pipeline.stream`. Arguments as for `generate`."""
    return _loaded(bundle).stream(prompt, **options)


def _loaded(bundle: Pipeline | str | Path) -> Pipeline:
    return bundle if isinstance(bundle, Pipeline) else load(bundle)
