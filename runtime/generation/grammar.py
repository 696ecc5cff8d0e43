"""Structured output: JSON schemas, regular expressions, grammars and choices, through llguidance.

llguidance keeps the state of a grammar token by token, can go back, computes the set of tokens that may follow, and
knows the tokens that have to. It needs nothing else, which is why it was taken: xgrammar computes masks as fast and
needs torch. `python -m tools.benchmarks.grammar_masks` compares them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from via_sd.contract.generation_options import GRAMMARS, GenerationConfig
from via_sd.errors import RequestError
from via_sd.runtime.decoding.logits_processors import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: JSON as `json.dumps` writes it. Where white space is free a small model may write it for ever, and less is forced; a
#: schema can allow it: {"x-guidance": {"whitespace_flexible": true}}.
_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarCompiler:
    """Compiles the grammars of requests for one model's vocabulary, which it reads with the first.

    Args:
        vocab_size: logits per row.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        self._tokenizer, self._eos, self._vocab_size = tokenizer, eos_token_ids, vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._lock = threading.Lock()

    def constraint(self, config: GenerationConfig, start: int) -> GrammarConstraint | None:
        """The constraint that `config` asks for, if any, on the answer to a prompt of `start` tokens.

        Raises:
            RequestError: no such grammar, or llguidance is not installed.
        """
        name = next((name for name in GRAMMARS if getattr(config, name) is not None), None)
        if name is None:
            return None
        try:
            from llguidance import LLMatcher
        except ModuleNotFoundError:
            raise RequestError(f"{name} needs llguidance: pip install 'via-sd-export[grammar]'") from None
        vocabulary = self._read_vocabulary()
        grammar = _definition(name, getattr(config, name))
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, vocabulary)
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        if failed or matcher.is_error():
            reason = " ".join((messages or [matcher.get_error()])[0].split())
            raise RequestError(f"{name} cannot be followed: {reason:.300}")
        return GrammarConstraint(matcher, start, self._vocab_size, self._eos)

    def _read_vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._lock:
            if self._vocabulary is None:
                # Ids beyond the logits cannot be generated, and llguidance refuses them.
                self._vocabulary = LLTokenizer(
                    self._tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=sorted(self._eos)
                )
            return self._vocabulary


class GrammarConstraint(Constraint):
    """Rules out what a grammar does not let follow. It keeps the matcher where the sequence is, back and forth.

    Args:
        matcher: at the grammar's beginning.
        start: length of the prompt, which the grammar does not concern.
    """

    def __init__(self, matcher: LLMatcher, start: int, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._matcher, self._start, self._vocab_size = matcher, start, vocab_size
        self._eos = eos_token_ids
        self._tokens: list[int] = []  # what the matcher has consumed
        self._masks: list[np.ndarray | None] = [None]  # after each of its beginnings
        self._forced: list[list[int] | None] = [None]
        self._end = np.zeros(vocab_size, bool)  # nothing but an end-of-sequence token
        self._end[[token for token in eos_token_ids if token < vocab_size]] = True

    def __call__(self, logits: np.ndarray, context: Sequence[int], draft: Sequence[int]) -> np.ndarray:
        """See `LogitsProcessor`."""
        return np.where(self._mask([*context[self._start :], *draft]), logits, np.float32(-np.inf))

    def allowed(self, context: Sequence[int], tokens: Sequence[int]) -> int:
        """See `Constraint.allowed`; nothing may follow an end-of-sequence token."""
        generated = list(context[self._start :])
        text = self._before_end(tokens)
        if not tokens or len(self._before_end(generated)) < len(generated):
            return 0
        self._move(generated)
        valid = 0 if self._matcher.is_stopped() else int(self._matcher.validate_tokens(text))
        if valid < len(text) or len(text) == len(tokens):
            return valid
        return valid + bool(self._mask([*generated, *text])[tokens[valid]])

    def forced(self, context: Sequence[int]) -> list[int]:
        """See `Constraint.forced`: the tokens of the text that has to follow, as the model's tokenizer divides it."""
        generated = list(context[self._start :])
        if len(self._before_end(generated)) < len(generated):
            return []
        known = self._forced[len(generated)] if self._is_behind(generated) else None
        if known is None:
            self._move(generated)
            known = [] if self._matcher.is_stopped() else list(self._matcher.compute_ff_tokens())
            self._forced[len(generated)] = known
        return list(known)

    def _mask(self, generated: list[int]) -> np.ndarray:
        """Whether each token may follow, bool [vocab]."""
        if len(self._before_end(generated)) < len(generated):
            return self._end
        known = self._masks[len(generated)] if self._is_behind(generated) else None
        if known is None:
            self._move(generated)
            if self._matcher.is_stopped():  # the grammar is complete, and nothing can extend it
                known = self._end
            else:
                bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
                known = np.unpackbits(bits, bitorder="little")[: self._vocab_size].view(bool)
            self._masks[len(generated)] = known
        return known

    def _before_end(self, tokens: Sequence[int]) -> list[int]:
        """`tokens` up to the first end-of-sequence token, which the matcher never gets: it could not go back then."""
        return list(takewhile(lambda token: token not in self._eos, tokens))

    def _is_behind(self, generated: list[int]) -> bool:
        """Whether the matcher has consumed `generated`, and maybe more."""
        return self._tokens[: len(generated)] == generated

    def _move(self, generated: list[int]) -> None:
        """Bring the matcher behind `generated`, which holds no end-of-sequence token."""
        common = 0
        for known, token in zip(self._tokens, generated, strict=False):
            if known != token:
                break
            common += 1
        back = len(self._tokens) - common
        if back and not self._matcher.rollback(back):
            raise RequestError(f"the grammar cannot go back {back} tokens: {self._matcher.get_error():.200}")
        del self._tokens[common:], self._masks[common + 1 :], self._forced[common + 1 :]
        rest = generated[common:]
        if rest and not self._matcher.consume_tokens(rest):
            raise RequestError(f"the grammar does not allow the text so far: {self._matcher.get_error():.200}")
        self._tokens += rest
        self._masks += [None] * len(rest)
        self._forced += [None] * len(rest)


@lru_cache(maxsize=64)
def _definition(kind: str, given: Any) -> str:
    """llguidance's own form of a grammar."""
    from llguidance import LLMatcher, grammar_from

    try:
        if kind == "json_schema":
            schema = json.loads(given)
            if not isinstance(schema, dict):
                raise RequestError(f"json_schema is {given!r:.60}, wanted a JSON object")
            return LLMatcher.grammar_from_json_schema(given, defaults=_JSON_STYLE)
        if kind == "choices":
            if not given:
                raise RequestError("choices is empty; give at least one text")
            return grammar_from("choice", json.dumps(given))
        return grammar_from("regex" if kind == "regex" else "grammar", given)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{kind} cannot be read: {' '.join(str(error).split()):.300}") from None
