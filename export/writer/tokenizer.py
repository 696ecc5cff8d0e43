"""What a runtime without transformers needs of a tokenizer: its files, its special tokens, every way a text can end."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from via_sd.contract.manifest import TOKENIZER_FILE
from via_sd.errors import ExportError
from via_sd.export.failures import describe
from via_sd.export.writer.chat_templates import read_chat_templates
from via_sd.export.writer.endings import end_of_turn, token_ids
from via_sd.export.writer.generation_defaults import warn_of_generation_defaults
from via_sd.files import read_json_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Copied when they are there.
_EXTRA_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")


def export_tokenizer(
    source: Path, target: Path, config: dict[str, Any], chat_template: Path | None = None
) -> dict[str, Any]:
    """Copy the tokenizer in Hugging Face directory `source` to `target` and describe it for the manifest.

    Args:
        chat_template: a file with the template to take instead of the model's.

    Returns:
        `eos_token_ids` (of model, generation and tokenizer configuration and of the chat template, sorted),
        `special_tokens` by role for the chat template, `chat_template` (the template's text, None if the model has
        none), and `chat_templates` (others by name).

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
    tokenizer_config, generation = _read(source / "tokenizer_config.json"), _read(source / "generation_config.json")
    tokenizer = load_tokenizer(source / TOKENIZER_FILE)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    special = {
        role: text
        for role in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := _text(tokenizer_config, role))
    }
    default, others = read_chat_templates(source, special, chat_template)
    ids = {*token_ids(config.get("eos_token_id")), *token_ids(generation.get("eos_token_id"))}
    if special.get("eos_token") in vocabulary:
        ids.add(vocabulary[special["eos_token"]])
    turn_end = end_of_turn(source, default, special, tokenizer)
    if turn_end is not None:
        ids.add(turn_end)
    if not ids:
        raise ExportError(
            f"{source} names no end-of-sequence token in its model, generation or tokenizer configuration"
        )
    _warn_of_tokens_beyond(source, vocabulary, config.get("vocab_size"))
    warn_of_generation_defaults(source, generation)
    return {
        "eos_token_ids": sorted(ids),
        "special_tokens": special,
        "chat_template": default,
        "chat_templates": others,
    }


def load_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer in `file`, which has encoded a text; raises `ExportError` for a damaged one."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.encode("Hello, world: 123.")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a plain Exception, or a panic, which is no Exception
        raise ExportError(f"{file} cannot be read: {describe(error)}") from None
    return tokenizer


def read_vocabulary(file: Path) -> dict[str, int]:
    """Id of every token of the tokenizer in `file`, special ones included; raises `ExportError` for a damaged one."""
    vocabulary: dict[str, int] = load_tokenizer(file).get_vocab(with_added_tokens=True)
    return vocabulary


def _warn_of_tokens_beyond(source: Path, vocabulary: dict[str, int], size: Any) -> None:
    """Say it if the tokenizer has tokens that the model has no row for: fine-tunes add some and forget the model."""
    if not isinstance(size, int):
        return
    beyond = sorted((index, token) for token, index in vocabulary.items() if index >= size)
    if beyond:
        index, token = beyond[0]
        warnings.warn(
            f"{source}: its tokenizer has {len(beyond)} tokens beyond the model's vocabulary of {size} ({token!r} is "
            f"{index}); prompts with them are refused",
            stacklevel=3,
        )


def _read(file: Path) -> dict[str, Any]:
    return read_json_object(file, ExportError) if file.exists() else {}


def _text(config: dict[str, Any], role: str) -> str | None:
    value = config.get(role)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
