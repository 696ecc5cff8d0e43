"""TensorRT engines of a bundle that share one set of weights."""

from via_sd.export.tensorrt.engine_set import EngineSet, build_engines
from via_sd.export.tensorrt.library import RTX, TARGETS, TENSORRT
from via_sd.export.tensorrt.profiles import DEFAULT_PREFILL, DEFAULT_TOKENS

__all__ = ["DEFAULT_PREFILL", "DEFAULT_TOKENS", "RTX", "TARGETS", "TENSORRT", "EngineSet", "build_engines"]
