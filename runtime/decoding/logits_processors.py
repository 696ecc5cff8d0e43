"""What a request does to logits before anything is chosen or drawn: penalties, biases, and tokens that are ruled out.

Every tier's rows pass the same processors, the drafter's included, so that exact modes stay exact: the acceptance test
compares what the processors made of them. A `Constraint` gives probability 0 to some tokens and can say so of a drafted
token without a row: such a draft is cut before a verifier sees it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from via_sd.contract.generation_options import GenerationConfig
from via_sd.errors import RequestError

#: A processor of the caller's: (tokens so far, logits float32 [vocab]) -> logits. It may change the array it is given.
CustomProcessor = Callable[[list[int], np.ndarray], np.ndarray]


class LogitsProcessor(Protocol):
    """Changes logits by what precedes them."""

    def __call__(self, logits: np.ndarray, context: Sequence[int], draft: Sequence[int]) -> np.ndarray:
        """Logits of the token after `context` and then `draft`: a new array, float32 [vocab]."""
        ...


class Constraint(ABC):
    """A processor that rules tokens out: their logits become -inf."""

    @abstractmethod
    def __call__(self, logits: np.ndarray, context: Sequence[int], draft: Sequence[int]) -> np.ndarray:
        """See `LogitsProcessor`."""

    @abstractmethod
    def allowed(self, context: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of `tokens`, from the first on, may follow `context`."""

    def forced(self, context: Sequence[int]) -> list[int]:
        """Tokens that are known to follow `context`, as far as that is known."""
        return []


def logits_processors(config: GenerationConfig, start: int) -> list[LogitsProcessor]:
    """The processors that follow from `config` alone, in the order in which they apply.

    Args:
        start: length of the prompt.
    """
    found: list[LogitsProcessor] = []
    if config.repetition_penalty != 1:
        found.append(RepetitionPenalty(config.repetition_penalty))
    if config.presence_penalty or config.frequency_penalty:
        found.append(OccurrencePenalty(config.presence_penalty, config.frequency_penalty, start))
    if config.logit_bias:
        found.append(LogitBias(config.logit_bias))
    if config.suppress_tokens:
        found.append(SuppressTokens(config.suppress_tokens))
    if config.no_repeat_ngram_size:
        found.append(NoRepeatNgram(config.no_repeat_ngram_size))
    return found


class RepetitionPenalty:
    """Divides positive and multiplies negative logits of tokens that precede by `penalty` (Keskar et al. 2019)."""

    def __init__(self, penalty: float) -> None:
        self._penalty = penalty

    def __call__(self, logits: np.ndarray, context: Sequence[int], draft: Sequence[int]) -> np.ndarray:
        """See `LogitsProcessor`."""
        present = np.unique(np.fromiter((*context, *draft), np.int64))
        result: np.ndarray = logits.copy()
        values = result[present]
        result[present] = np.where(values > 0, values / self._penalty, values * self._penalty)
        return result


class OccurrencePenalty:
    """Lowers the logits of generated tokens: once by `presence`, and by `frequency` for every time they occurred.

    Args:
        start: length of the prompt, whose tokens do not count.
    """

    def __init__(self, presence: float, frequency: float, start: int) -> None:
        self._presence, self._frequency, self._start = presence, frequency, start

    def __call__(self, logits: np.ndarray, context: Sequence[int], draft: Sequence[int]) -> np.ndarray:
        """See `LogitsProcessor`."""
        generated = np.fromiter((*context[self._start :], *draft), np.int64)
        tokens, counts = np.unique(generated, return_counts=True)
        result: np.ndarray = logits.copy()
        result[tokens] -= np.float32(self._presence) + np.float32(self._frequency) * counts.astype(np.float32)
        return result


class LogitBias:
    """Adds to the logits of some tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._tokens = np.fromiter(bias.keys(), np.int64)
        self._bias = np.fromiter(bias.values(), np.float32)

    def __call__(self, logits: np.ndarray, context: Sequence[int], draft: Sequence[int]) -> np.ndarray:
        """See `LogitsProcessor`."""
        result: np.ndarray = logits.copy()
        result[self._tokens] += self._bias
        return result


class SuppressTokens(Constraint):
    """Rules tokens out where at least `start` and fewer than `end` tokens precede; everywhere if neither is given."""

    def __init__(self, tokens: Sequence[int], start: int = 0, end: int | None = None) -> None:
        self._tokens = frozenset(tokens)
        self._indices = np.fromiter(sorted(self._tokens), np.int64)
        self._start, self._end = start, end

    def __call__(self, logits: np.ndarray, context: Sequence[int], draft: Sequence[int]) -> np.ndarray:
        """See `LogitsProcessor`."""
        if not self._applies(len(context) + len(draft)):
            return logits
        result: np.ndarray = logits.copy()
        result[self._indices] = -np.inf
        return result

    def allowed(self, context: Sequence[int], tokens: Sequence[int]) -> int:
        """See `Constraint.allowed`."""
        for index, token in enumerate(tokens):
            if token in self._tokens and self._applies(len(context) + index):
                return index
        return len(tokens)

    def _applies(self, position: int) -> bool:
        return self._start <= position and (self._end is None or position < self._end)


class MinNewTokens(Constraint):
    """Rules out tokens that end a text before `end` tokens precede, unless others rule out everything else.

    It applies behind the other constraints: a grammar that is complete may end the text before.
    """

    def __init__(self, tokens: Iterable[int], end: int) -> None:
        self._tokens, self._end = frozenset(tokens), end
        self._indices = np.fromiter(sorted(self._tokens), np.int64)

    def __call__(self, logits: np.ndarray, context: Sequence[int], draft: Sequence[int]) -> np.ndarray:
        """See `LogitsProcessor`."""
        if len(context) + len(draft) >= self._end:
            return logits
        result: np.ndarray = logits.copy()
        result[self._indices] = -np.inf
        return logits if result.max() == -np.inf else result

    def allowed(self, context: Sequence[int], tokens: Sequence[int]) -> int:
        """See `Constraint.allowed`; a text that may end after all is not drafted to its end."""
        early = tokens[: max(0, self._end - len(context))]
        return next((index for index, token in enumerate(early) if token in self._tokens), len(tokens))


class NoRepeatNgram(Constraint):
    """Rules out tokens that would complete an n-gram which prompt or answer have already (as in transformers)."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, logits: np.ndarray, context: Sequence[int], draft: Sequence[int]) -> np.ndarray:
        """See `LogitsProcessor`."""
        banned = self._banned(np.fromiter((*context, *draft), np.int64))
        if not len(banned):
            return logits
        result: np.ndarray = logits.copy()
        result[banned] = -np.inf
        return result

    def allowed(self, context: Sequence[int], tokens: Sequence[int]) -> int:
        """See `Constraint.allowed`."""
        sequence = np.fromiter((*context, *tokens), np.int64)
        for index, token in enumerate(tokens):
            if token in self._banned(sequence[: len(context) + index]):
                return index
        return len(tokens)

    def _banned(self, sequence: np.ndarray) -> np.ndarray:
        """Tokens that followed the last n - 1 tokens before."""
        width = self._size - 1
        if len(sequence) < self._size:
            return np.empty(0, np.int64)
        windows = np.lib.stride_tricks.sliding_window_view(sequence[:-1], width) if width else None
        if windows is None:
            return np.unique(sequence)
        matches = np.flatnonzero((windows == sequence[len(sequence) - width :]).all(axis=1))
        return sequence[matches + width]


class BadWords(Constraint):
    """Rules out the last token of each of some token sequences where the others precede it (as in transformers)."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._words = [tuple(word) for word in words]

    def __call__(self, logits: np.ndarray, context: Sequence[int], draft: Sequence[int]) -> np.ndarray:
        """See `LogitsProcessor`."""
        banned = self._banned([*context[-self._longest :], *draft])
        if not banned:
            return logits
        result: np.ndarray = logits.copy()
        result[banned] = -np.inf
        return result

    def allowed(self, context: Sequence[int], tokens: Sequence[int]) -> int:
        """See `Constraint.allowed`."""
        sequence = list(context[-self._longest :])
        for index, token in enumerate(tokens):
            if token in self._banned(sequence):
                return index
            sequence.append(token)
        return len(tokens)

    @property
    def _longest(self) -> int:
        return max(map(len, self._words))

    def _banned(self, sequence: Sequence[int]) -> list[int]:
        end = len(sequence)
        return [
            word[-1]
            for word in self._words
            if len(word) == 1 or tuple(sequence[max(0, end - len(word) + 1) :]) == word[:-1]
        ]


class Custom(Constraint):
    """A processor of the caller's.

    What it rules out is known only from a row, so a drafted token that it forbids costs its place in a forward pass.
    """

    def __init__(self, process: CustomProcessor) -> None:
        self._process = process

    def __call__(self, logits: np.ndarray, context: Sequence[int], draft: Sequence[int]) -> np.ndarray:
        """See `LogitsProcessor`."""
        result = np.asarray(self._process([*context, *draft], logits.copy()), np.float32)
        if result.shape != logits.shape:
            raise RequestError(
                f"a logits processor returned an array of shape {list(result.shape)}, wanted {list(logits.shape)}"
            )
        if not np.isfinite(result.max()):  # NaN propagates
            raise RequestError(
                f"the largest logit that a logits processor returned is {result.max()}; return finite logits, and -inf "
                "for tokens that are ruled out"
            )
        return result

    def allowed(self, context: Sequence[int], tokens: Sequence[int]) -> int:
        """All of them, as far as one can know."""
        return len(tokens)
