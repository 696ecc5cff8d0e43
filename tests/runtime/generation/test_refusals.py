"""Bad bundles, prompts and options: each one message that says what was found, what was wanted and what to do."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.pipelines import WatchedPipeline, table_pipeline
from tests.support.table_engine import TableEngine, hashed_logits
from tests.support.tiny import MAX_SEQ_LEN
from via_sd.contract.generation_options import OPTIONS, ROUTING
from via_sd.files import fast_hash
from via_sd.runtime import BundleError, GenerationConfig, Pipeline, RequestError, load_bundle
from via_sd.runtime.generation.chat import render_chat


@pytest.fixture
def bundle(tiny_bundle_model_drafter: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny_bundle_model_drafter, tmp_path / "bundle"))


def edit_manifest(bundle: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    file = bundle / "bundle.json"
    manifest = json.loads(file.read_text(encoding="utf-8"))
    edit(manifest)
    file.write_text(json.dumps(manifest), encoding="utf-8")


def test_a_place_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for place in (tmp_path / "nowhere", tmp_path, file):
        with pytest.raises(BundleError, match=r"is no bundle: it has no bundle\.json; make one with"):
            Pipeline.load(place)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe{}", b"", b'{"format": "via-sd-bundle", "version"'], ids=repr)
def test_a_corrupt_manifest_is_named(content: bytes, bundle: Path) -> None:
    (bundle / "bundle.json").write_bytes(content)
    with pytest.raises(BundleError, match=r"bundle\.json is corrupt .*export the bundle again"):
        Pipeline.load(bundle)


@pytest.mark.parametrize("content", ["[]", "{}", "null", '{"format": "something else"}', '"via-sd-bundle"'])
def test_json_that_is_no_manifest_is_named(content: str, bundle: Path) -> None:
    (bundle / "bundle.json").write_text(content)
    with pytest.raises(BundleError, match="is not a manifest of format via-sd-bundle"):
        Pipeline.load(bundle)


@pytest.mark.parametrize("name", ["verifier/model.onnx", "drafter/model.onnx", "tokenizer.json"])
def test_a_file_that_the_manifest_does_not_list_is_not_loaded_unchecked(name: str, bundle: Path) -> None:
    edit_manifest(bundle, lambda manifest: manifest["files"].pop(name))
    with pytest.raises(BundleError, match=rf"bundle\.json does not list {name}; export the bundle again"):
        Pipeline.load(bundle)


@pytest.mark.parametrize("version", [0, 1, 3, "2", None])
def test_another_format_version_is_refused_with_what_this_release_reads(version: Any, bundle: Path) -> None:
    edit_manifest(bundle, lambda manifest: manifest.update(version=version))
    with pytest.raises(BundleError, match=rf"has bundle version {version!r}, this release reads 2; export it again"):
        Pipeline.load(bundle)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key of the nested manifest the runtime may look at."""
    for key in value if isinstance(value, dict) else ():
        yield (*path, key)
        if key not in ("files", "check", "made_by"):
            yield from _paths(value[key], (*path, key))


@pytest.mark.parametrize("damage", ["missing", "another type"])
def test_a_manifest_that_lacks_anything_is_refused_and_never_trips_the_loader(damage: str, bundle: Path) -> None:
    whole = (bundle / "bundle.json").read_text(encoding="utf-8")
    loaded = 0
    for path in list(_paths(json.loads(whole))):
        (bundle / "bundle.json").write_text(whole, encoding="utf-8")

        def spoil(manifest: Any, path: tuple[Any, ...] = path) -> None:
            for key in path[:-1]:
                manifest = manifest[key]
            if damage == "missing":
                del manifest[path[-1]]
            else:
                manifest[path[-1]] = 0.5 if isinstance(manifest[path[-1]], (dict, list, str)) else "nonsense"

        edit_manifest(bundle, spoil)
        try:
            # Whatever loads must run: a key that is not needed is not missed.
            Pipeline.load(bundle, verify=False, threads=1).generate("a", max_new_tokens=3, mode="routed")
            loaded += 1
        except BundleError as error:
            assert "bundle" in str(error)  # noqa: PT017 - what else it raises is the failure looked for
    assert loaded > 5


EVERY_FILE = [*(f"verifier/{name}" for name in ("weights.data", "model.onnx", "slim.onnx")), "drafter/model.onnx"]


@pytest.mark.parametrize("name", [*EVERY_FILE, "tokenizer.json"])
def test_a_file_that_is_missing_cut_or_changed_is_named(name: str, bundle: Path) -> None:
    file = bundle / name
    content = bytearray(file.read_bytes())
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 1
    for damaged, complaint in (
        (content[:-1], rf"has {len(content) - 1} bytes, wanted {len(content)}"),
        (bytearray(), rf"has 0 bytes, wanted {len(content)}"),
        (changed, r"is changed \(XXH3 [0-9a-f]{16}, wanted [0-9a-f]{16}\)"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(BundleError, match=rf"{name} {complaint}.*copy or export"):
            Pipeline.load(bundle)
    file.write_bytes(content)
    assert Pipeline.load(bundle, threads=1).generate("a", max_new_tokens=1).finish_reason in ("length", "stop")
    file.unlink()
    with pytest.raises(BundleError, match=rf"{name} is missing; export the bundle again or copy it whole"):
        Pipeline.load(bundle)


def test_one_changed_byte_anywhere_in_the_weights_is_found(bundle: Path) -> None:
    file = bundle / "verifier/weights.data"
    content = file.read_bytes()
    for at in (0, 1, len(content) // 3, len(content) - 1):
        changed = bytearray(content)
        changed[at] ^= 0x80
        file.write_bytes(changed)
        with pytest.raises(BundleError, match=r"weights\.data is changed"):
            load_bundle(bundle)


def test_hashes_are_skipped_on_request_but_sizes_are_not(bundle: Path) -> None:
    file = bundle / "verifier/weights.data"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert load_bundle(bundle, verify=False).slim == "slim"
    file.write_bytes(content[:-1])
    with pytest.raises(BundleError, match="bytes, wanted"):
        load_bundle(bundle, verify=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_manifest_that_may_not_be_read_says_so(bundle: Path) -> None:
    (bundle / "bundle.json").chmod(0)
    with pytest.raises(BundleError, match=r"cannot read .*bundle\.json: Permission denied"):
        Pipeline.load(bundle)


def test_a_graph_onnx_runtime_cannot_load_is_named(bundle: Path) -> None:
    (bundle / "verifier/model.onnx").write_bytes(b"\x08" * (bundle / "verifier/model.onnx").stat().st_size)
    with pytest.raises(BundleError, match=r"ONNX Runtime \S+ cannot load .*model\.onnx"):
        Pipeline.load(bundle, verify=False)


def test_an_unreadable_tokenizer_is_named(bundle: Path) -> None:
    file = bundle / "tokenizer.json"
    file.write_bytes(b" " * file.stat().st_size)
    with pytest.raises(BundleError, match=r"tokenizer\.json cannot be read"):
        Pipeline.load(bundle, verify=False)


def test_truncation_or_padding_left_in_a_tokenizer_file_touches_no_prompt(bundle: Path) -> None:
    file = bundle / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    wanted = tokenizer.encode("a long enough prompt").ids
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=32)
    tokenizer.save(str(file))
    entry = {"size": file.stat().st_size, "xxh3": fast_hash(file)}
    edit_manifest(bundle, lambda manifest: manifest["files"].update({"tokenizer.json": entry}))
    assert Pipeline.load(bundle, threads=1).encode("a long enough prompt", raw=True) == wanted


# -- requests --------------------------------------------------------------------------------------------------------


@pytest.fixture
def pipeline(tiny_pipelines: dict[str, WatchedPipeline]) -> WatchedPipeline:
    return tiny_pipelines["ngram"]


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("prompt", ["", []], ids=repr)
def test_an_empty_prompt_is_refused(prompt: Any, raw: bool, pipeline: WatchedPipeline) -> None:
    with pytest.raises(RequestError, match="the prompt is empty; give it at least one character"):
        pipeline.generate(prompt, raw=raw)


@pytest.mark.parametrize("prompt", [3, None, [3.5], [True], [3, "hello"], {"role": "user", "content": "x"}], ids=repr)
def test_what_is_neither_text_nor_messages_is_refused(prompt: Any, pipeline: WatchedPipeline) -> None:
    with pytest.raises(RequestError, match="neither a text nor a list of messages"):
        pipeline.generate(prompt)


def test_messages_a_template_cannot_put_together_are_refused() -> None:
    with pytest.raises(RequestError, match="the chat template cannot render this conversation"):
        render_chat("{{ 3 + messages[0]['content'] }}", [{"role": "user", "content": "x"}], {})


@pytest.mark.parametrize("mode", ["plain", "speculative", "cascade", "routed", "auto"])
@pytest.mark.parametrize("kind", ["ngram", "mask", "model"])
def test_a_prompt_of_one_token_and_one_that_fills_the_buffer_but_one_are_served(
    kind: str, mode: str, tiny_pipelines: dict[str, WatchedPipeline]
) -> None:
    pipeline = tiny_pipelines[kind]
    one = pipeline.generate("x", mode=mode, raw=True, max_new_tokens=12, ignore_eos=True)
    assert (one.prompt_tokens, len(one.token_ids), one.finish_reason) == (1, 12, "length")
    long = "x" * (MAX_SEQ_LEN - 1)
    full = pipeline.generate(long, mode=mode, raw=True, max_new_tokens=12, ignore_eos=True)
    assert (full.prompt_tokens, len(full.token_ids), full.finish_reason) == (MAX_SEQ_LEN - 1, 1, "length")
    assert full.token_ids == pipeline.generate(long, mode="plain", raw=True, ignore_eos=True).token_ids


def test_a_prompt_that_leaves_no_room_is_refused_with_both_lengths(pipeline: WatchedPipeline) -> None:
    message = rf"the prompt has {MAX_SEQ_LEN} tokens, the KV buffers take {MAX_SEQ_LEN - 1} .*--max-seq-len"
    with pytest.raises(RequestError, match=message):
        pipeline.generate("x" * MAX_SEQ_LEN, raw=True)


def test_a_text_ends_with_the_buffer(pipeline: WatchedPipeline) -> None:
    for mode in ("plain", "speculative", "cascade", "routed"):
        found = pipeline.generate("x" * 240, mode=mode, raw=True, max_new_tokens=1000, ignore_eos=True)
        assert (len(found.token_ids), found.finish_reason) == (MAX_SEQ_LEN - 240, "length")


def test_a_conversation_goes_through_the_chat_template_and_a_raw_one_is_refused(pipeline: WatchedPipeline) -> None:
    turns = (("user", "Hi"), ("assistant", "Yo"), ("user", "?"))
    conversation = [{"role": role, "content": content} for role, content in turns]
    assert pipeline.tokenizer.decode(pipeline.encode(conversation), skip_special_tokens=False) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n<|im_start|>user\n?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert pipeline.encode("Hi") == pipeline.encode([{"role": "user", "content": "Hi"}])
    with pytest.raises(RequestError, match="takes a text, not a conversation"):
        pipeline.encode(conversation, raw=True)


@pytest.mark.parametrize(
    "bad",
    [
        {"mode": "warp"},
        {"router": "none"},
        {"max_new_tokens": 0},
        {"gamma": 0},
        {"max_lag": 0},
        {"logprobs": -1},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"alpha1": 2.0},
        {"max_divergence": 1.5},
        {"max_new_tokens": 5.5},
        {"top_k": 2.5},
        {"seed": "7"},
        {"temperature": "warm"},
        {"max_lag": None},
        {"stop": 3},
        {"stop": ["a", 3]},
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused_before_anything_runs(bad: dict[str, Any], pipeline: WatchedPipeline) -> None:
    (name,) = bad
    with pytest.raises(RequestError, match=name):
        GenerationConfig(**bad)
    with pytest.raises(RequestError, match=name):
        pipeline.stream("x", **bad)


def test_an_unknown_option_is_refused_with_those_there_are(pipeline: WatchedPipeline) -> None:
    with pytest.raises(RequestError, match=r"no option is called tempo; options are mode, max_new_tokens"):
        pipeline.generate("x", tempo=1)


def test_what_may_be_left_out_may_be_none(pipeline: WatchedPipeline) -> None:
    options = {
        "stop": None,
        "seed": None,
        "logprobs": None,
        "gamma": None,
        "max_divergence": None,
        "alpha1": None,
        "router": None,
    }
    assert pipeline.generate("x", raw=True, max_new_tokens=3, ignore_eos=True, **options).logprobs is None


def test_options_go_on_top_of_a_configuration(pipeline: WatchedPipeline) -> None:
    config = GenerationConfig(mode="plain", max_new_tokens=3, raw=True, ignore_eos=True)
    assert len(pipeline.generate("x", config).token_ids) == 3
    assert len(pipeline.generate("x", config, max_new_tokens=5).token_ids) == 5


def test_modes_that_need_slim_are_refused_where_there_is_none(tmp_path: Path) -> None:
    pipeline = table_pipeline(TableEngine(hashed_logits(5), 5, tiers=("full",)), tmp_path, slim=None)
    for mode in ("cascade", "routed"):
        with pytest.raises(RequestError, match=f"mode {mode} needs a slim-verifier.*exported without a mask.*--mask"):
            pipeline.stream("abc", mode=mode, raw=True)
    assert pipeline.generate("abc", raw=True, max_new_tokens=4).stats.mode in ("plain", "speculative")


@pytest.mark.parametrize("mode", ["plain", "speculative", "cascade"])
@pytest.mark.parametrize(
    "asked", [{"router": "paper"}, {"alpha1": 0.4}, {"alpha2": 0.4}, {"keep_margins": True}], ids=str
)
def test_what_concerns_the_router_is_refused_in_a_mode_that_has_none(
    mode: str, asked: dict[str, Any], pipeline: WatchedPipeline
) -> None:
    (name,) = asked
    with pytest.raises(RequestError, match=f"{name} concerns the router, and mode {mode} has none; use mode routed"):
        pipeline.stream("x", mode=mode, raw=True, **asked)
    assert pipeline.generate("x", mode="routed", raw=True, max_new_tokens=3, **asked).stats.mode == "routed"
    assert pipeline.generate("x", raw=True, max_new_tokens=3, **asked).stats.mode == "speculative", "auto has none here"


SATISFIED: dict[str, Any] = {  # every other option, with another value than its default
    "max_new_tokens": 4, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {5: 1.0}, "suppress_tokens": [5],
    "bad_words": ["x"], "no_repeat_ngram_size": 3, "min_new_tokens": 2, "json_schema": "{}", "regex": "[a-z]+",
    "grammar": 'root ::= "a"', "choices": ["a", "b"], "seed": 3, "stop": ["x"], "stop_token_ids": [5],
    "skip_special_tokens": False, "echo": True, "ignore_eos": True, "raw": True, "logprobs": 2, "gamma": 2,
    "max_lag": 5, "max_divergence": 0.5, "audit_tail": True,
}  # fmt: skip


@pytest.mark.parametrize("mode", ["plain", "speculative", "cascade", "routed"])
def test_every_other_option_is_taken_in_every_mode(mode: str, pipeline: WatchedPipeline) -> None:
    pytest.importorskip("llguidance", reason="needs the grammar extra")
    assert {*SATISFIED, *ROUTING, "mode"} == set(OPTIONS)
    for name, value in SATISFIED.items():
        given: dict[str, Any] = {"max_new_tokens": 4, name: value}
        assert pipeline.generate("the", mode=mode, **given).stats.mode == mode, name


def test_a_stream_has_no_completion_before_its_end(pipeline: WatchedPipeline) -> None:
    stream = pipeline.stream("x", raw=True)
    next(stream)
    with pytest.raises(RequestError, match="the stream has not ended"):
        _ = stream.completion
    stream.close()
