"""What the token masks of grammars cost: `python -m tools.benchmarks.grammar_masks TOKENIZER`.

For each grammar a text that it accepts is fed token by token, and the mask of every position is computed. llguidance
comes with the extra `grammar`; xgrammar is measured beside it where it is installed (it needs torch).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from tokenizers import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"enum": ["Köln", "Bonn", "Aachen"]}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
ANSWER = {
    "name": "Ada Lovelace, countess", "age": 36, "email": "ada@example.org",
    "tags": ["first programmer", "mathématiques"],
    "address": {"street": "12 St. James's Square, a long way from here", "city": "Köln"},
}  # fmt: skip
REGEX, DATES = r"(\d{4}-\d{2}-\d{2}(T\d{2}:\d{2}:\d{2}(Z|[+-]\d{2}:\d{2}))?, ?)+", "2026-01-31T10:20:30Z, 2027-12-01, "
#: kind -> grammar, and a text it accepts.
GRAMMARS: dict[str, tuple[Any, str]] = {
    "json schema": (PERSON, json.dumps(ANSWER, ensure_ascii=False)),
    "any json": ({}, json.dumps(ANSWER, ensure_ascii=False)),
    "regex": (REGEX, DATES),
}
#: (compile, then masks of a text of so many tokens): seconds to compile, and of every mask.
Measured = tuple[float, list[float]]


def with_llguidance(file: Path, tokenizer: Tokenizer) -> tuple[float, Callable[[Any, list[int]], Measured]]:
    from llguidance import LLMatcher, LLTokenizer

    begun = perf_counter()
    vocabulary = LLTokenizer(str(file), n_vocab=tokenizer.get_vocab_size())
    loaded = perf_counter() - begun
    mask = np.zeros(-(-tokenizer.get_vocab_size() // 32), np.int32)

    def run(grammar: Any, tokens: list[int]) -> Measured:
        begun = perf_counter()
        made = (
            LLMatcher.grammar_from_regex(grammar)
            if isinstance(grammar, str)
            else LLMatcher.grammar_from_json_schema(grammar)
        )
        matcher = LLMatcher(vocabulary, made)
        matcher.compute_bitmask()
        compiled, times = perf_counter() - begun, []
        for token in tokens:
            begun = perf_counter()
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            times.append(perf_counter() - begun)
            if not matcher.consume_token(token):
                raise SystemExit(f"llguidance refuses a token of the text: {matcher.get_error()}")
        return compiled, times

    return loaded, run


def with_xgrammar(file: Path, tokenizer: Tokenizer) -> tuple[float, Callable[[Any, list[int]], Measured]]:
    import xgrammar

    begun = perf_counter()
    names = [tokenizer.id_to_token(index) or "" for index in range(tokenizer.get_vocab_size())]
    stop = [index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    info = xgrammar.TokenizerInfo(names, xgrammar.VocabType.BYTE_LEVEL, vocab_size=len(names), stop_token_ids=stop)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    loaded = perf_counter() - begun
    mask = xgrammar.allocate_token_bitmask(1, len(names))

    def run(grammar: Any, tokens: list[int]) -> Measured:
        begun = perf_counter()
        if isinstance(grammar, str):
            compiled_grammar = compiler.compile_regex(grammar)
        elif grammar:
            compiled_grammar = compiler.compile_json_schema(json.dumps(grammar), any_whitespace=True)
        else:
            compiled_grammar = compiler.compile_builtin_json_grammar()
        matcher = xgrammar.GrammarMatcher(compiled_grammar)
        compiled, times = perf_counter() - begun, []
        for token in tokens:
            begun = perf_counter()
            matcher.fill_next_token_bitmask(mask)
            times.append(perf_counter() - begun)
            if not matcher.accept_token(token):
                raise SystemExit("xgrammar refuses a token of the text")
        return compiled, times

    return loaded, run


def measured(file: Path, repeats: int) -> Iterator[str]:
    """Lines of the table for the tokenizer in `file`."""
    tokenizer = Tokenizer.from_file(str(file))
    for name, prepare in (("llguidance", with_llguidance), ("xgrammar", with_xgrammar)):
        try:
            loaded, run = prepare(file, tokenizer)
        except ModuleNotFoundError as error:
            yield f"{name}: not measured, {error.name} is not installed"
            continue
        yield f"{name}, {tokenizer.get_vocab_size()} tokens: vocabulary read in {loaded:.2f} s"
        for kind, (grammar, text) in GRAMMARS.items():
            tokens = tokenizer.encode(text, add_special_tokens=False).ids
            runs = [run(grammar, tokens) for _ in range(repeats)]
            times = sorted(min(run[1][i] for run in runs) for i in range(len(tokens)))
            compiled = median(compiled for compiled, _ in runs)
            yield (
                f"  {kind:12} compiled in {1e3 * compiled:8.2f} ms; mask, microseconds: "
                f"median {1e6 * median(times):7.0f}, mean {1e6 * sum(times) / len(times):7.0f}, "
                f"longest {1e6 * times[-1]:7.0f} over {len(times)} tokens"
            )


def main(
    tokenizers: Annotated[list[Path], typer.Argument(help="Files tokenizer.json.")],
    repeats: Annotated[int, typer.Option(help="Runs of each text; the least time of a mask counts.", min=1)] = 3,
) -> None:
    """Measure what the token masks of grammars cost."""
    for file in tokenizers:
        for line in measured(file, repeats):
            print(line)


if __name__ == "__main__":
    typer.run(main)
