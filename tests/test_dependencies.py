"""The runtime runs where only its own few dependencies are installed; other packages say which extra is missing."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.blocked import BLOCKED, HEAVY, run_blocked

GENERATE = """
from via_sd.runtime import Pipeline

pipeline = Pipeline.load(sys.argv[2])
result = {m: pipeline.generate("abc abc", mode=m, max_new_tokens=12, ignore_eos=True).token_ids
          for m in ("plain", "speculative", "cascade", "routed")}
ours = sorted(name for name in sys.modules if name.startswith(("via_sd.export", "via_sd.tools")))
print(json.dumps([result, ours]))
"""


def test_a_bundle_is_loaded_and_run_in_every_mode_without_the_heavy_packages(tiny_bundle):
    """Nor without what only the command line needs."""
    result, ours = json.loads(run_blocked(GENERATE, HEAVY | {"typer", "rich"}, str(tiny_bundle)))
    assert ours == []
    assert all(len(tokens) == 12 for tokens in result.values())
    assert result["plain"] == result["speculative"] == result["cascade"]


COMMAND = """
from via_sd.tools.commands.main import app

app(sys.argv[2:])
"""


def test_generate_and_inspect_need_no_export_packages(tiny_bundle):
    said = run_blocked(
        COMMAND, HEAVY, "generate", str(tiny_bundle), "--prompt", "abc", "--max-new-tokens", "4", "--json"
    )
    assert json.loads(said)["stats"]["emitted_tokens"] <= 4
    assert json.loads(run_blocked(COMMAND, HEAVY, "inspect", str(tiny_bundle), "--json"))["kind"] == "bundle"


def test_bad_input_is_one_message_where_nothing_can_be_exported(tmp_path):
    command = [sys.executable, "-c", BLOCKED + COMMAND, json.dumps(sorted(HEAVY)), "generate", str(tmp_path)]
    done = subprocess.run([*command, "--prompt", "x"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "is no bundle" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_mask_file_is_read_and_written_without_any_engine(tmp_path):
    code = """
from via_sd.masks.maskfile import Mask, read_mask, write_mask

write_mask(Mask.from_layers([True, False]), sys.argv[2])
print(read_mask(sys.argv[2]).keep_mlp)
"""
    assert run_blocked(code, HEAVY | {"onnxruntime"}, str(tmp_path / "mask.json")) == "(True, False)\n"


def test_an_engine_that_is_not_installed_is_named(tiny_bundle):
    code = """
from via_sd.runtime import BundleError, Pipeline

try:
    Pipeline.load(sys.argv[2])
except BundleError as error:
    print(error)
"""
    assert "pip install 'via-sd-export[cpu]'" in run_blocked(code, {"onnxruntime"}, str(tiny_bundle))


def test_exporting_without_its_packages_says_which_extra_to_install(tiny_checkpoint, tmp_path):
    code = """
from via_sd.tools.commands.main import app

app(["export", *sys.argv[2:]])
"""
    command = [sys.executable, "-c", BLOCKED + code, json.dumps(["mobius"]), str(tiny_checkpoint), "--out", "b"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "pip install 'via-sd-export[export]'" in done.stderr
    assert list(tmp_path.iterdir()) == []
