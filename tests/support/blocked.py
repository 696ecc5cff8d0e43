"""An interpreter in which some packages cannot be imported, as if they were not installed."""

from __future__ import annotations

import json
import subprocess
import sys

#: What an edge box has none of; that the runtime imports none of it is a contract in pyproject.toml.
HEAVY = {
    "torch", "transformers", "onnx", "onnx_ir", "onnxscript", "mobius", "safetensors", "gguf", "accelerate",
    "huggingface_hub", "optuna", "matplotlib", "scipy", "polygraphy",
}  # fmt: skip

BLOCKED = """
import json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED_NAMES:
            raise ImportError(f"{name} is not installed")

BLOCKED_NAMES = set(json.loads(sys.argv[1]))
sys.meta_path.insert(0, Blocker())
"""


def run_blocked(code: str, blocked: set[str], *arguments: str) -> str:
    """Run `code` in a new interpreter in which `blocked` cannot be imported; what it prints."""
    command = [sys.executable, "-c", BLOCKED + code, json.dumps(sorted(blocked)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
