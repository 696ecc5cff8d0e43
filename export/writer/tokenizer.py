"""What a runtime without transformers needs of a tokenizer: its files, its special tokens, every way a text can end."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from via_sd.contract.manifest import TOKENIZER_FILE
from via_sd.errors import ExportError
from via_sd.export.writer.chat_templates import read_chat_templates
from via_sd.files import read_json

#: Copied when they are there.
_EXTRA_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")


def export_tokenizer(
    source: Path, target: Path, config: dict[str, Any], chat_template: Path | None = None
) -> dict[str, Any]:
    """Copy the tokenizer in Hugging Face directory `source` to `target` and describe it for the manifest.

    Args:
        chat_template: a file with the template to take instead of the model's.

    Returns:
        `eos_token_ids` (model config, generation config and tokenizer together, sorted), `special_tokens` by role for
        the chat template, `chat_template` (the template's text, None if the model has none), and `chat_templates`
        (others by name).

    Raises:
        ExportError: no `tokenizer.json`, which is the only tokenizer file that needs no Python of its own to read, or a
            chat template that cannot be parsed.
    """
    if not (source / TOKENIZER_FILE).is_file():
        raise ExportError(
            f"{source} has no {TOKENIZER_FILE}; load it with transformers.AutoTokenizer and save it there"
        )
    for name in (TOKENIZER_FILE, *_EXTRA_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    tokenizer_config = _read(source / "tokenizer_config.json")
    vocabulary = read_vocabulary(source / TOKENIZER_FILE)
    special = {
        role: text
        for role in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := _text(tokenizer_config, role))
    }
    ids = {
        *token_ids(config.get("eos_token_id")),
        *token_ids(_read(source / "generation_config.json").get("eos_token_id")),
    }
    if special.get("eos_token") in vocabulary:
        ids.add(vocabulary[special["eos_token"]])
    if not ids:
        raise ExportError(
            f"{source} names no end-of-sequence token in its model, generation or tokenizer configuration"
        )
    default, others = read_chat_templates(source, special, chat_template)
    return {
        "eos_token_ids": sorted(ids),
        "special_tokens": special,
        "chat_template": default,
        "chat_templates": others,
    }


def read_vocabulary(file: Path) -> dict[str, int]:
    """Id of every token of the tokenizer in `file`, special ones included; raises `ExportError` for a damaged one."""
    from tokenizers import Tokenizer

    try:
        vocabulary: dict[str, int] = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise ExportError(f"{file} cannot be read: {error}") from None
    return vocabulary


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = read_json(file)
    except ValueError as error:
        raise ExportError(f"{file} is not JSON: {error}") from None
    return data if isinstance(data, dict) else {}


def _text(config: dict[str, Any], role: str) -> str | None:
    value = config.get(role)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def token_ids(value: Any) -> list[int]:
    """Token ids as configurations write them: none, one, or a list."""
    if value is None:
        return []
    return [int(v) for v in (value if isinstance(value, list) else [value])]
