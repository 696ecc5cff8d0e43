"""How byte-level tokenizers split a text before they merge pairs, by the names that llama.cpp writes into GGUF files.

A name is here only if its way of splitting, and all else that differs from tokenizer to tokenizer, is known for sure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str, digits: str) -> str:
    """A word ends where capitals begin; `ending` may follow it."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}"
    return f"{words}|{digits}" + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_TEKKEN = _cased("", r"\p{N}")
_GPT4O = _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split.

    Attributes:
        pattern: what is one piece; None for the pattern of GPT-2, which the library has.
        single_digits: every digit is a piece of its own, before anything else.
        composes: text is brought to Unicode's composed form (NFC) first.
        whole_words: a piece that is a token is that token, whatever its pairs would merge to.
        begins: the token that begins a text is added where the file does not say.
    """

    pattern: str | None = None
    single_digits: bool = False
    composes: bool = False
    whole_words: bool = False
    begins: bool = False

    def to_json(self) -> dict[str, Any]:
        """The pre-tokenizer as `tokenizer.json` has it."""
        steps: list[dict[str, Any]] = []
        if self.single_digits:
            steps.append({"type": "Digits", "individual_digits": True})
        if self.pattern is not None:
            steps.append({"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": False})
        steps.append(
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": self.pattern is None,
            }
        )
        return {"type": "Sequence", "pretokenizers": steps}


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(single_digits=True)
_LLAMA = PreTokenizer(_LLAMA3, whole_words=True, begins=True)

PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "llama-bpe": _LLAMA,
    "dbrx": PreTokenizer(_LLAMA3),
    "smaug-bpe": PreTokenizer(_LLAMA3),
    "qwen2": PreTokenizer(_QWEN2, composes=True),
    "deepseek-r1-qwen": PreTokenizer(_QWEN2),
    "tekken": PreTokenizer(_TEKKEN, whole_words=True, begins=True),
    "gpt-4o": PreTokenizer(_GPT4O),
    "llama4": PreTokenizer(_GPT4O, begins=True),
}
