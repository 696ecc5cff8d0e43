"""From a request and its model to logits processors: grammars, ruled out words and tokens, the caller's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from via_sd.contract.generation_options import GenerationConfig
from via_sd.contract.model_settings import SAMPLING
from via_sd.errors import RequestError
from via_sd.runtime.decoding.logits_processors import (
    BadWords,
    Custom,
    CustomProcessor,
    LogitsProcessor,
    MinNewTokens,
    SuppressTokens,
)
from via_sd.runtime.generation.grammar import GrammarCompiler
from via_sd.runtime.generation.text import encode_text

#: The rules of a model that are options of a request too.
_OPTIONS = ("suppress_tokens", "no_repeat_ngram_size", "min_new_tokens")


class TokenControl:
    """Makes the logits processors of requests for one model.

    Args:
        model_rules: the manifest's `generation_config`.
        vocab_size: logits per row of the verifier.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: frozenset[int], model_rules: Mapping[str, Any], vocab_size: int
    ) -> None:
        self._tokenizer, self._eos, self._rules = tokenizer, eos_token_ids, model_rules
        self._vocab_size = vocab_size
        self._grammars = GrammarCompiler(tokenizer, eos_token_ids, vocab_size)

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling settings that the model's publisher recommends, by the names of `GenerationConfig`."""
        return {name: self._rules[name] for name in SAMPLING if name in self._rules}

    def resolve(self, config: GenerationConfig) -> GenerationConfig:
        """`config` with the model's rules where it is silent.

        Raises:
            RequestError: a token id that the model does not have.
        """
        open_: dict[str, Any] = {name: self._rules.get(name) for name in _OPTIONS if getattr(config, name) is None}
        config = replace(config, **open_)
        for name in ("suppress_tokens", "stop_token_ids", "logit_bias"):
            for token in getattr(config, name) or ():
                if token >= self._vocab_size:
                    raise RequestError(f"{name} has the token {token}; this model's are 0 to {self._vocab_size - 1}")
        return config

    def processors(
        self, config: GenerationConfig, start: int, custom: Sequence[CustomProcessor] = ()
    ) -> list[LogitsProcessor]:
        """The processors of a resolved `config`, but for those that follow from it alone.

        Args:
            start: length of the prompt.
            custom: the caller's own, which apply last.

        Raises:
            RequestError: a grammar that cannot be followed.
        """
        found: list[LogitsProcessor] = []
        grammar = self._grammars.constraint(config, start)
        if grammar is not None:
            found.append(grammar)
        if words := self._bad_words(config):
            found.append(BadWords(words))
        if begin := self._rules.get("begin_suppress_tokens"):
            found.append(SuppressTokens(begin, start, start + 1))
        if config.min_new_tokens:
            ends = self._eos | frozenset(config.stop_token_ids)
            found.append(MinNewTokens(ends, start + config.min_new_tokens))
        return [*found, *map(Custom, custom)]

    def _bad_words(self, config: GenerationConfig) -> list[list[int]]:
        """Token sequences of the bad words, each as it stands at the beginning of a text and within one."""
        if config.bad_words is None:
            return [list(word) for word in self._rules.get("bad_words_ids", ())]
        found: list[list[int]] = []
        for word in config.bad_words:
            for text in (word, f" {word.lstrip(' ')}"):
                tokens = encode_text(self._tokenizer, text, "a bad word")
                if tokens and tokens not in found:
                    found.append(tokens)
        return found
