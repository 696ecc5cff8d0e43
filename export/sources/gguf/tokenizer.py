"""The tokenizer of a GGUF file, as the files a Hugging Face directory has: `tokenizer.json` and what lies beside it.

A file names how text is split before pairs are merged (`tokenizer.ggml.pre`). Splitting otherwise gives other tokens
for the same text, without an error anywhere, so a name that is not known here is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.export.failures import one_message
from via_sd.export.sources.gguf.file import GgufFile
from via_sd.export.sources.gguf.pre_tokenizers import PRE_TOKENIZERS

_ADVICE = "give the model's Hugging Face checkpoint, or a GGUF file that a newer llama.cpp converted"
#: Types of tokens, as llama.cpp numbers them.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
#: Keys with tokens that end a text or a turn.
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_REWRITING = ("remove_extra_whitespaces", "precompiled_charsmap")
_TEMPLATE = "tokenizer.chat_template"
_KNOWN = {
    "model", "pre", "tokens", "token_type", "scores", "merges", "added_tokens", "add_bos_token", "add_eos_token",
    "add_sep_token", "add_space_prefix", "remove_extra_whitespaces", "precompiled_charsmap", "token_type_count",
    "seperator_token_id", "separator_token_id", "cls_token_id", "mask_token_id", "fim_pre_token_id", "fim_suf_token_id",
    "fim_mid_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id", "prefix_token_id",
    "suffix_token_id", "middle_token_id", *_ROLES.values(), *_ENDS,
}  # fmt: skip


def write_tokenizer(file: GgufFile, directory: Path) -> tuple[str, ...]:
    """Write the tokenizer, its configuration and the tokens that end a text to `directory`.

    Returns:
        Keys of the tokenizer that are not read, as notes.

    Raises:
        ExportError: a tokenizer that is missing, or whose parts do not fit each other.
        UnsupportedModelError: a kind of tokenizer, or a way to split text, that is not known.
    """
    tokens = _list(file, "tokens", str)
    ids = {role: _token_id(file, key, len(tokens)) for role, key in _ROLES.items()}
    with one_message(f"the tokenizer in {file.path} cannot be built", UnsupportedModelError, _ADVICE):
        described = _byte_level(file, tokens) if _kind(file) == "gpt2" else _sentencepiece(file, tokens)
    _add_ends(file, described, tokens, ids)
    _dump(directory / "tokenizer.json", described)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {role: tokens[index] for role, index in ids.items() if index is not None}
    if templates := _templates(file):
        config["chat_template"] = templates
    _dump(directory / "tokenizer_config.json", config)
    ends = [_token_id(file, key, len(tokens)) for key in _ENDS]
    _dump(
        directory / "generation_config.json",
        {"eos_token_id": sorted({end for end in ends if end is not None}), "bos_token_id": ids["bos_token"]},
    )
    unknown = sorted(
        key
        for key in file.keys
        if key.startswith("tokenizer.ggml.") and key.removeprefix("tokenizer.ggml.") not in _KNOWN
    )
    return (f"{file.path.name}: not read: {', '.join(unknown)}",) if unknown else ()


def _kind(file: GgufFile) -> str:
    kind = file.keys.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{file.path} has a tokenizer of kind {kind!r} (tokenizer.ggml.model), wanted gpt2 or llama; {_ADVICE}"
        )
    return str(kind)


def _list(file: GgufFile, name: str, kind: type) -> list[Any]:
    found = file.keys.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not found or not all(isinstance(entry, kind) for entry in found):
        raise ExportError(f"{file.path} has no tokenizer.ggml.{name}; {_ADVICE}")
    return found


def _token_id(file: GgufFile, key: str, size: int) -> int | None:
    index = file.keys.get(f"tokenizer.ggml.{key}")
    if index is None or index == 0xFFFFFFFF or index == -1:
        return None
    if not isinstance(index, int) or not 0 <= index < size:
        raise ExportError(f"{file.path} has tokenizer.ggml.{key} {index!r}, wanted one of its {size} tokens")
    return index


def _types(file: GgufFile, tokens: list[str]) -> list[int]:
    types = _list(file, "token_type", int)
    if len(types) != len(tokens):
        raise ExportError(f"{file.path} has {len(types)} token types for {len(tokens)} tokens; fetch it again")
    return types


def _byte_level(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """Byte-level BPE: `tokenizer.json` as a mapping."""
    name = file.keys.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        said = "names no pre-tokenizer" if name is None else f"splits text by pre-tokenizer {name!r}"
        raise UnsupportedModelError(
            f"{file.path} {said} (tokenizer.ggml.pre), wanted one of {', '.join(sorted(PRE_TOKENIZERS))}: with another "
            f"one its texts have other tokens; {_ADVICE}"
        )
    pre_tokenizer = PRE_TOKENIZERS[name]
    types = _types(file, tokens)
    vocabulary = {
        token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED
    }
    merges = [merge.split(" ") for merge in _list(file, "merges", str)]
    broken = [merge for merge in merges if len(merge) != 2 or "".join(merge) not in vocabulary]
    if broken:
        raise ExportError(f"{file.path} has a merge {' '.join(broken[0])!r} that makes no token; fetch it again")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, types),
        "normalizer": {"type": "NFC"} if pre_tokenizer.composes else None,
        "pre_tokenizer": pre_tokenizer.to_json(),
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre_tokenizer.whole_words,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _added(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    """Tokens that stand for themselves wherever they occur in a text."""
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _sentencepiece(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """SentencePiece BPE, through the class of transformers that families of this kind have."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    if rewritten := [name for name in _REWRITING if file.keys.get(f"tokenizer.ggml.{name}")]:
        raise UnsupportedModelError(f"{file.path} has a tokenizer that rewrites texts ({rewritten[0]}); {_ADVICE}")
    types = _types(file, tokens)
    facts = {"tokenizer_type": "llama", "tokens": tokens, "token_type": types}
    for name in ("scores", "merges"):
        if f"tokenizer.ggml.{name}" in file.keys:
            facts[name] = file.keys[f"tokenizer.ggml.{name}"]
    backend, _ = convert_gguf_tokenizer(file.architecture, facts)
    described: dict[str, Any] = json.loads(backend.to_str())
    vocabulary = described["model"]["vocab"]
    if file.keys.get("tokenizer.ggml.add_space_prefix") is False and described.get("pre_tokenizer"):
        described["pre_tokenizer"]["prepend_scheme"] = "never"
    moved = [token for index, token in enumerate(tokens) if vocabulary.get(token, index) != index]
    if moved:
        raise UnsupportedModelError(f"{file.path} has token {moved[0]!r} twice; {_ADVICE}")
    return described


def _add_ends(file: GgufFile, described: dict[str, Any], tokens: list[str], ids: dict[str, int | None]) -> None:
    """Have the tokenizer put the tokens around a text that the file asks for."""
    kind, name = file.keys.get("tokenizer.ggml.model"), file.keys.get("tokenizer.ggml.pre")
    by_default = kind == "llama" or (name in PRE_TOKENIZERS and PRE_TOKENIZERS[name].begins)
    wanted = {
        "bos_token": file.keys.get("tokenizer.ggml.add_bos_token", by_default),
        "eos_token": file.keys.get("tokenizer.ggml.add_eos_token", False),
    }
    special = {}
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
    for role, place in (("bos_token", 0), ("eos_token", len(pair))):
        index = ids[role]
        if not wanted[role] or index is None:
            continue
        token = tokens[index]
        special[token] = {"id": token, "ids": [index], "tokens": [token]}
        for sequence in (single, pair):
            sequence.insert(min(place, len(sequence)), {"SpecialToken": {"id": token, "type_id": 0}})
    described["post_processor"] = (
        {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special} if special else None
    )


def _templates(file: GgufFile) -> str | list[dict[str, str]] | None:
    """The chat template, or all of them by name where there are several."""
    named = {
        key.removeprefix(f"{_TEMPLATE}."): text for key, text in file.keys.items() if key.startswith(f"{_TEMPLATE}.")
    }
    default = file.keys.get(_TEMPLATE)
    if not named:
        return default if isinstance(default, str) else None
    if isinstance(default, str):
        named = {"default": default, **named}
    return [{"name": name, "template": text} for name, text in named.items() if isinstance(text, str)]


def _dump(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
