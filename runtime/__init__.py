"""Bundle -> text. Needs numpy, tokenizers and an engine; never torch, transformers or onnx."""

from __future__ import annotations

from typing import TYPE_CHECKING

from via_sd.lazy import lazy_names

if TYPE_CHECKING:
    from via_sd.contract.generation_options import GenerationConfig
    from via_sd.contract.manifest import Bundle, load_bundle
    from via_sd.contract.mode_names import EXACT_MODES, MODES
    from via_sd.errors import BundleError, BusyError, LogitsError, RequestError, ViaSdError
    from via_sd.runtime.generation.api import generate, load, stream
    from via_sd.runtime.generation.completion import Chunk, Completion, TokenLogprobs
    from via_sd.runtime.generation.pipeline import Pipeline
    from via_sd.runtime.generation.prompts import Prompt, PromptOptions
    from via_sd.runtime.generation.stream import CompletionStream
else:
    __getattr__ = lazy_names(
        __name__,
        {
            **dict.fromkeys(("Bundle", "load_bundle"), "via_sd.contract.manifest"),
            **dict.fromkeys(("BundleError", "BusyError", "LogitsError", "RequestError", "ViaSdError"), "via_sd.errors"),
            **dict.fromkeys(("EXACT_MODES", "MODES"), "via_sd.contract.mode_names"),
            **dict.fromkeys(("generate", "load", "stream"), "via_sd.runtime.generation.api"),
            **dict.fromkeys(("Chunk", "Completion", "TokenLogprobs"), "via_sd.runtime.generation.completion"),
            "GenerationConfig": "via_sd.contract.generation_options",
            "Pipeline": "via_sd.runtime.generation.pipeline",
            **dict.fromkeys(("Prompt", "PromptOptions"), "via_sd.runtime.generation.prompts"),
            "CompletionStream": "via_sd.runtime.generation.stream",
        },
    )

__all__ = [
    "EXACT_MODES",
    "MODES",
    "Bundle",
    "BundleError",
    "BusyError",
    "Chunk",
    "Completion",
    "CompletionStream",
    "GenerationConfig",
    "LogitsError",
    "Pipeline",
    "Prompt",
    "PromptOptions",
    "RequestError",
    "TokenLogprobs",
    "ViaSdError",
    "generate",
    "load",
    "load_bundle",
    "stream",
]
