"""From token ids to text as it grows: whole characters only, stop strings held back until they are certain."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tokenizers import Tokenizer

from via_sd.errors import RequestError

_UNKNOWN = "\ufffd"  # what a decoder makes of bytes that are no character (yet)


def encode_text(tokenizer: Tokenizer, text: str, what: str) -> list[int]:
    """Token ids of a text without special tokens.

    Raises:
        RequestError: it has no UTF-8; the message calls it `what`.
    """
    try:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)
    except (TypeError, UnicodeEncodeError):  # what the library says of such a text
        raise RequestError(f"{what} holds half a surrogate pair, which is no character; remove it") from None


class Detokenizer:
    """Token ids to text, with or without special tokens. Remembers the text of single tokens, which streams ask for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._single: dict[tuple[int, bool], str] = {}
        #: The special tokens' text by their ids.
        self.special = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    def __call__(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(tokens) != 1:
            return str(self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))
        key = (tokens[0], skip_special_tokens)
        text = self._single.get(key)
        if text is None:
            text = str(self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))
            self._single[key] = text
        return text


class TextStream:
    """Decodes tokens one by one and looks for stop strings across their borders.

    The text shown so far never has to be taken back: half a character waits for its other bytes, and text that may be
    the beginning of a stop string waits until it is or is not one. Tokens are decoded together with those of the piece
    before them, since what a token stands for may depend on what precedes it; that, unlike `DecodeStream` of the
    tokenizers library, also gets past bytes that never become a character, whatever the decoder makes of them.

    Where a stop string holds a special token, special tokens are decoded too, and left out of what is shown.
    """

    def __init__(self, detokenize: Detokenizer, stop: Sequence[str] = (), *, skip_special_tokens: bool = True) -> None:
        self._stop = tuple(s for s in stop if s)
        self._special = detokenize.special
        decodes = not skip_special_tokens or any(text in s for s in self._stop for text in self._special.values())
        self._decode = partial(detokenize, skip_special_tokens=not decodes)
        self._hides = decodes and skip_special_tokens
        self._hidden: list[tuple[int, int]] = []  # where special tokens lie in the text
        self._longest_stop = max((len(s) for s in self._stop), default=0)
        self._window: list[int] = []  # tokens of the last piece, and those behind it that are no text yet
        self._known = 0  # how many of them belong to the last piece
        self._known_text = ""
        self._decoded = ""
        self._shown = 0
        self.stopped = False

    def push(self, token: int, *, searching: bool = True) -> bool:
        """Take one token; False if it completed a stop string (the text then ends before that string).

        `searching` is False for text that no stop string ends.
        """
        self._window.append(token)
        piece = self._undecoded()
        if piece and not piece.endswith(_UNKNOWN):
            if self._hides and (name := self._special.get(token)) and piece.endswith(name):
                end = len(self._decoded) + len(piece)
                self._hidden.append((end - len(name), end))
            self._extend(piece, searching)
            self._window = self._window[self._known :]
            self._known = len(self._window)
            self._known_text = self._decode(self._window)
        return not self.stopped

    def take(self) -> str:
        """The text that is certain and was not taken yet."""
        return self._show(len(self._decoded) - (0 if self.stopped else self._undecided()))

    def finish(self) -> str:
        """The rest of the text, once no token follows; bytes that never became a character are shown as U+FFFD.

        `stopped` tells whether a stop string ended it after all, completed by a token that ends within a character.
        """
        if not self.stopped:
            self._extend(self._undecoded())
        return self._show(len(self._decoded))

    @property
    def length(self) -> int:
        """Characters decoded so far that are or will be shown, unless they turn out to begin a stop string."""
        return len(self._decoded) - sum(end - start for start, end in self._hidden)

    @property
    def text(self) -> str:
        """All text taken so far."""
        return self._visible(0, self._shown)

    def _undecoded(self) -> str:
        """Text of the tokens behind the last piece."""
        return self._decode(self._window)[len(self._known_text) :]

    def _extend(self, piece: str, searching: bool = True) -> None:
        """Add `piece`, up to the first stop string that is complete."""
        start = max(0, len(self._decoded) - self._longest_stop)
        self._decoded += piece
        if not searching:
            return
        found = [(at + len(s), at) for s in self._stop if (at := self._decoded.find(s, start)) >= 0]
        if found:
            self._decoded = self._decoded[: min(found)[1]]
            self.stopped = True

    def _show(self, end: int) -> str:
        piece = self._visible(self._shown, end)
        self._shown = max(self._shown, end)
        return piece

    def _visible(self, start: int, end: int) -> str:
        """The text from `start` to `end` without hidden special tokens."""
        pieces = []
        for hidden_start, hidden_end in self._hidden:
            if hidden_end > start and hidden_start < end:
                pieces.append(self._decoded[start:hidden_start])
                start = hidden_end
        pieces.append(self._decoded[start:end])
        return "".join(pieces)

    def _undecided(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._decoded)), longest, -1):
                if self._decoded.endswith(stop[:length]):
                    longest = length
                    break
        return longest
