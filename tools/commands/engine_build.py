"""Engines that are built on this machine, and noted as such."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from via_sd.runtime.engines.trust import built_here, record_built, record_file
from via_sd.tools.commands.console import err

if TYPE_CHECKING:
    from via_sd.export.tensorrt import EngineSet


class Dtype(StrEnum):
    """Element type of weights, activations and KV."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def build_here(bundle: Path, target: str, **options: Any) -> EngineSet:
    """`build_engines`, keeping no plan that came from elsewhere, and noting that those it builds were built here."""
    from via_sd.export.tensorrt import build_engines

    result = build_engines(bundle, target, trusted=built_here(), **options)
    files, engines = result.manifest["files"], result.manifest["engines"]
    try:
        record_built(files[engines[name]["plan"]]["sha256"] for name in result.built)
    except OSError as error:
        err.print(f"cannot note in {record_file()} that these engines were built here ({error}), so they will be")
        err.print("taken for engines from elsewhere, which are run only by those who say that they trust them")
    return result
