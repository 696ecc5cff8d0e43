"""Prompt files: JSON lines, {"prompt": …, "bucket": …}."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from via_sd.errors import PromptFileError


@dataclass(frozen=True)
class Prompt:
    """A prompt and the kind of work it stands for."""

    text: str
    bucket: str


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts in `path`; a line without a bucket goes to `default`.

    Raises:
        PromptFileError: no file, a line that is no JSON object with a `prompt`, or no prompt at all.
    """
    try:
        # JSON lines end with a line feed alone; Unicode's other line ends may stand in a text.
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(f"cannot read prompts {path}: {error}") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise PromptFileError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(data, dict) or not isinstance(data.get("prompt"), str) or not data["prompt"]:
            raise PromptFileError(f'{path}, line {number}: wanted {{"prompt": "…", "bucket": "…"}}, found {line[:60]}')
        prompts.append(Prompt(data["prompt"], str(data.get("bucket", "default"))))
    if not prompts:
        raise PromptFileError(f"{path} has no prompts")
    return prompts
