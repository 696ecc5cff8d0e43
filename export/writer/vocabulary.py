"""Whether a drafter speaks the verifier's vocabulary: the same token strings under the same ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from via_sd.contract.graphs import DRAFTER, VERIFIER
from via_sd.contract.manifest import TOKENIZER_FILE
from via_sd.errors import ExportError
from via_sd.export.writer.tokenizer import read_vocabulary


def check_vocabularies(
    verifier: Path, drafter: Path, verifier_config: dict[str, Any], drafter_config: dict[str, Any]
) -> int:
    """Compare two tokenizers by token string and id, special tokens included.

    Vocabularies that differ only in padding (logits beyond the last real token) are accepted.

    Returns:
        The number of ids both models can emit; the drafter's logits from there on are padding.

    Raises:
        ExportError: a token that differs, named.
    """
    ours, theirs = read_vocabulary(verifier / TOKENIZER_FILE), read_vocabulary(drafter / TOKENIZER_FILE)
    if ours != theirs:
        differing = sorted(set(ours.items()) ^ set(theirs.items()), key=lambda item: (item[1], item[0]))
        token, index = differing[0]
        raise ExportError(
            f"the drafter's vocabulary differs from the verifier's in {len(differing)} entries: token {token!r} is "
            f"{theirs.get(token, 'missing')} for the drafter and {ours.get(token, 'missing')} for the verifier "
            f"(first at id {index}); use a drafter of the same family"
        )
    real = max(ours.values()) + 1
    for name, config in ((VERIFIER, verifier_config), (DRAFTER, drafter_config)):
        if int(config["vocab_size"]) < real:
            raise ExportError(f"the {name} has {config['vocab_size']} logits for {real} tokens")
    return real
