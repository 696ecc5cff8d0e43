"""What is fuzzed: each reader with a good input, made of the tiny models of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.benchmarks.fuzz.runner import Reader

_MODELS = """
import sys
from pathlib import Path
from tests.support import tiny
from tests.support.gguf_files import write_gguf

root = Path(sys.argv[1])
checkpoint = tiny.write_verifier(root / "checkpoint")
slim, _ = tiny.write_masks(root / "masks")
tiny.write_bundle(checkpoint, root / "bundle", slim, "ngram")
write_gguf(checkpoint, root / "model.gguf")
"""
_SIDE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_RULES = {"eos_token_id": [1], "suppress_tokens": [5], "temperature": 0.7, "do_sample": True, "no_repeat_ngram_size": 3}
_TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }}{% endif -%}{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}<|{{ m['role'] | upper }}|>{{ m['content'] | trim | replace('a', 'b') }}"
    "{% if loop.last and add_generation_prompt %}{{ bos_token }}{% endif %}{% endfor %}"
    "{% macro f(x) %}{{ x[:3] }}{% endmacro %}{{ f(messages[0].content) }}"
)
_JINJA = (
    "{% for i in range(10**9) %}",
    "{% endfor %}",
    "{{ 'x' * 10**9 }}",
    "{{ messages }}",
    "| join('a' * 1000)",
    "|tojson",
    "{% if ",
    "{% endif %}",
    "{{ ''.__class__ }}",
    "{{ (1).__class__.__mro__ }}",
    "{{ cycler.__init__ }}",
    "%}",
    "{{",
    "}}",
    "{% set x = x ~ x %}",
    "{{ '%1000000000d' % 1 }}",
    "| center(10**9)",
    "{{ raise_exception('no') }}",
    "{% macro g() %}{{ g() }}",
    "{% endmacro %}{{ g() }}",
    "10**10**10",
    "{{ range(10**12) | list }}",
    "| replace('', 'xxxxxxxx')",
    "{{ f(f) }}",
    "{{ strftime_now('%Y' * 10000) }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{{ messages | map('upper') | list }}",
    "{{ none.x }}",
    "{{ 1 / 0 }}",
    "| sort",
    "| indent(99999999)",
    "[::-1]",
    "{% generation %}",
    "{% break %}",
    "\\x00",
)


_REQUEST: dict[str, Any] = {
    "text_input": "What is an aardvark?",
    "stream": True,
    "max_tokens": 20,
    "mode": "cascade",
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "seed": 7,
    "stop_words": ["one", "two"],
    "bad_words": ["three"],
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "min_length": 2,
    "beam_width": 1,
    "return_log_probs": True,
    "guided_decoding_guide_type": "regex",
    "guided_decoding_guide": "[a-z]+",
}


def make_models(root: Path) -> Path:
    """Make the tiny models in the folder `root`; in a process of its own, whose threads no fork inherits."""
    if not (root / "model.gguf").exists():
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-W", "ignore", "-c", _MODELS, str(root)], check=True, env=environment)
    return root


def _files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _checkpoint_reader() -> Callable[[Path], None]:
    """Opens a checkpoint; what that imports is imported now, rather than in the first execution."""
    import mobius  # noqa: F401
    import torch
    import transformers

    from via_sd.export.sources.checkpoint import open_checkpoint

    assert torch.__version__, transformers.AutoConfig
    torch.set_num_threads(1)

    def read(source: Path) -> None:
        with open_checkpoint(source):
            pass

    return read


def gguf(models: Path) -> Reader:
    """A GGUF file, up to the graph with its weights."""
    content = (models / "model.gguf").read_bytes()
    read = _checkpoint_reader()
    return Reader(lambda folder: read(folder / "model.gguf"), {"model.gguf": content}, ["model.gguf"])


def safetensors(models: Path) -> Reader:
    """The header of a safetensors file and config.json, up to the graph with its weights."""
    files = _files(models / "checkpoint")
    return Reader(_checkpoint_reader(), files, ["config.json", "model.safetensors"])


def tokenizer(models: Path) -> Reader:
    """The files beside the weights, as `export` reads them, and the tokenizer that it writes."""
    from via_sd.export.sources.checkpoint import read_config
    from via_sd.export.writer.generation_config import read_generation_config
    from via_sd.export.writer.tokenizer import export_tokenizer, load_tokenizer

    def read(folder: Path) -> None:
        target = folder / "bundle"
        target.mkdir()
        export_tokenizer(folder, target, read_config(folder / "config.json"))
        read_generation_config(folder)
        load_tokenizer(target / "tokenizer.json").decode([1, 2, 3])

    files = {name: (models / "checkpoint" / name).read_bytes() for name in _SIDE_FILES}
    files["generation_config.json"] = json.dumps(_RULES).encode()
    return Reader(read, files, _SIDE_FILES)


def _generate(folder: Path) -> None:
    from via_sd.runtime import Pipeline

    Pipeline.load(folder, threads=1, max_sequences=1).generate("the thing", max_new_tokens=3)


def manifest(models: Path) -> Reader:
    """bundle.json, up to a generated text."""
    return Reader(_generate, _files(models / "bundle"), ["bundle.json"])


def mask(models: Path) -> Reader:
    """A mask file."""
    from via_sd.masks import read_mask

    files = {"mask.json": (models / "masks" / "slim.json").read_bytes(), "other.json": b'{"skip_layers": [1, 2]}'}

    def read(folder: Path) -> None:
        for name in files:
            read_mask(folder / name, num_layers=6, mask_format="skip").to_json()

    return Reader(read, files, list(files))


def policy(models: Path) -> Reader:
    """A policy in a bundle, up to a generated text; a damaged one is no reason to refuse."""
    from via_sd.runtime import load_bundle
    from via_sd.runtime.decoding.router import RouterMargins
    from via_sd.runtime.engines.backends import ONNXRUNTIME
    from via_sd.runtime.generation.machine import this_machine
    from via_sd.runtime.generation.policy import Policy
    from via_sd.runtime.generation.policy_file import policy_file, policy_json

    bundle, machine = load_bundle(models / "bundle"), this_machine(ONNXRUNTIME, 1)
    costs = {1: 1.0, 4: 1.4, 16: 3.0}
    found = Policy({"mode": "cascade"}, "cascade", costs, costs, 0.01, RouterMargins(0.02, {0.0: 9.0, 0.02: 1.0}))
    name = policy_file(bundle, machine).relative_to(bundle.path).as_posix()
    content = json.dumps(policy_json(bundle, machine, found, {})).encode()
    return Reader(_generate, {**_files(models / "bundle"), name: content}, [name])


def template(models: Path) -> Reader:
    """A chat template, up to a rendered prompt."""
    from via_sd.contract.chat_template import ChatTemplate

    def read(folder: Path) -> None:
        text = (folder / "template.jinja").read_bytes().decode("utf-8", "replace")
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is an aardvark?"}]
        ChatTemplate(text, {"bos_token": "<s>"}).render(messages)

    return Reader(read, {"template.jinja": _TEMPLATE.encode()}, ["template.jinja"], _JINJA)


def request(models: Path) -> Reader:
    """The tensors and parameters of a Triton request, up to the options of a generation."""
    import numpy as np

    from via_sd.contract.generation_options import GenerationConfig
    from via_sd.contract.served_model import INPUTS
    from via_sd.runtime.triton.request import Defaults, InvalidRequest, parse_request

    numpy_types = {"STRING": np.object_, "BOOL": np.bool_, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32}
    kinds = {spec.name: numpy_types[spec.data_type] for spec in INPUTS}

    def array(kind: Any, given: Any) -> Any:
        """A tensor as Triton hands it on: of the declared type, whatever the client meant; None if it cannot be one."""
        given = given if isinstance(given, list) else [given]
        if kind is np.object_:
            texts = [each if isinstance(each, str) else json.dumps(each) for each in given]
            return np.array([[text.encode("utf-8", "surrogatepass") for text in texts]], np.object_)
        try:
            return None if kind is None else np.array([given]).astype(kind).reshape(1, -1)
        except (ValueError, TypeError, OverflowError):
            return None

    def read(folder: Path) -> None:
        try:
            data = json.loads((folder / "request.json").read_bytes())
            named = {name: array(kinds.get(name), given) for name, given in data["inputs"].items()}
            parameters = {str(name): value for name, value in data["parameters"].items()}
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            return  # Triton itself refuses what is no request
        tensors = {name: values for name, values in named.items() if values is not None}
        options = parse_request(tensors, parameters, Defaults()).options
        GenerationConfig(**{name: options[name] for name in options if name in GenerationConfig.__dataclass_fields__})

    content = json.dumps({"inputs": _REQUEST, "parameters": {"timeout": 5_000_000}}).encode()
    return Reader(read, {"request.json": content}, ["request.json"], expected=(InvalidRequest,))


READERS: dict[str, Callable[[Path], Reader]] = {
    make.__name__: make for make in (gguf, safetensors, tokenizer, manifest, mask, policy, template, request)
}
