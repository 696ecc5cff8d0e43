"""Bundle -> text. Needs numpy, tokenizers and an engine; never torch, transformers or onnx."""

from via_sd.runtime.bundle import Bundle, load_bundle
from via_sd.runtime.completion import Chunk, Completion, TokenLogprobs
from via_sd.runtime.config import GenerationConfig
from via_sd.runtime.errors import BundleError, BusyError, RequestError, ViaSdError
from via_sd.runtime.modes import EXACT_MODES, MODES
from via_sd.runtime.pipeline import Pipeline
from via_sd.runtime.stream import CompletionStream

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
    "Pipeline",
    "RequestError",
    "TokenLogprobs",
    "ViaSdError",
    "load_bundle",
]
