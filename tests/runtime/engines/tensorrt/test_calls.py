"""What the engine's code calls exists in the libraries it calls: as much as can be seen of it without a GPU."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from via_sd.runtime.engines.tensorrt import cuda, engine, launcher

trt = pytest.importorskip("tensorrt_rtx", reason="needs the tensorrt-rtx extra")

#: What the code calls an object -> its class in the library.
OBJECTS = {
    "trt": trt,
    "plan": trt.ICudaEngine,
    "context": trt.IExecutionContext,
    "config": trt.IRuntimeConfig,
    "_runtime": trt.Runtime,
}


def chains(module: ModuleType) -> Iterator[tuple[str, ...]]:
    """Every dotted access in a module, such as ("trt", "Logger", "WARNING")."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if names and isinstance(node, ast.Name):
            yield (node.id, *reversed(names))


def test_every_call_of_tensorrt_exists():
    written = [chain for module in (engine, launcher) for chain in chains(module)]
    used = {chain for chain in written if chain[0] in OBJECTS}
    used |= {chain[1:] for chain in written if chain[:2] == ("self", "_runtime")}
    used = {chain for chain in used if len(chain) > 1}
    assert {chain[0] for chain in used} == set(OBJECTS)
    for chain in used:
        found: Any = OBJECTS[chain[0]]
        for name in chain[1:]:
            assert hasattr(found, name), ".".join(chain)
            found = getattr(found, name)


def test_every_call_of_the_driver_exists():
    driver = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    calls = set()
    for module in (cuda, engine, launcher):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value[:2] == "cu":
                calls.add(node.value)
    calls = {name for name in calls if name[2:3].isupper()}
    assert len(calls) > 15
    for name in sorted(calls):
        assert hasattr(driver, name), name
    kinds = driver.CUdevice_attribute
    assert hasattr(kinds, "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR")
    assert hasattr(driver.CUstreamCaptureMode, "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL")
