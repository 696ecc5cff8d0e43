"""TensorRT engines under the decoding modes: checked against their manifest, one copy of the weights on the device."""

from via_sd.runtime.engines.engine_files import EngineFiles, Host, check_host, read_engine_files
from via_sd.runtime.engines.tensorrt.engine import load_engines
from via_sd.runtime.engines.trust import record_built

__all__ = ["EngineFiles", "Host", "check_host", "load_engines", "read_engine_files", "record_built"]
