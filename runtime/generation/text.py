"""From token ids to text as it grows: whole characters only, stop strings held back until they are certain."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_UNKNOWN = "\ufffd"  # what a decoder makes of bytes that are no character (yet)


class Detokenizer:
    """Token ids to text, without special tokens. Remembers the text of single tokens, which streams keep asking for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._single: dict[int, str] = {}

    def __call__(self, tokens: Sequence[int]) -> str:
        if len(tokens) != 1:
            return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        text = self._single.get(tokens[0])
        if text is None:
            text = self._single[tokens[0]] = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        return text


class TextStream:
    """Decodes tokens one by one and looks for stop strings across their borders.

    The text shown so far never has to be taken back: half a character waits for its other bytes, and text that may be
    the beginning of a stop string waits until it is or is not one. Tokens are decoded together with those of the piece
    before them, since what a token stands for may depend on what precedes it; that, unlike `DecodeStream` of the
    tokenizers library, also gets past bytes that never become a character, whatever the decoder makes of them.
    """

    def __init__(self, detokenize: Detokenizer, stop: Sequence[str] = ()) -> None:
        self._decode = detokenize
        self._stop = tuple(s for s in stop if s)
        self._longest_stop = max((len(s) for s in self._stop), default=0)
        self._window: list[int] = []  # tokens of the last piece, and those behind it that are no text yet
        self._known = 0  # how many of them belong to the last piece
        self._known_text = ""
        self._decoded = ""
        self._shown = 0
        self.stopped = False

    def push(self, token: int) -> bool:
        """Take one token; False if it completed a stop string (the text then ends before that string)."""
        self._window.append(token)
        piece = self._undecoded()
        if piece and not piece.endswith(_UNKNOWN):
            self._extend(piece)
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
    def text(self) -> str:
        """All text taken so far."""
        return self._decoded[: self._shown]

    def _undecoded(self) -> str:
        """Text of the tokens behind the last piece."""
        return self._decode(self._window)[len(self._known_text) :]

    def _extend(self, piece: str) -> None:
        """Add `piece`, up to the first stop string that is complete."""
        start = max(0, len(self._decoded) - self._longest_stop)
        self._decoded += piece
        found = [(at + len(s), at) for s in self._stop if (at := self._decoded.find(s, start)) >= 0]
        if found:
            self._decoded = self._decoded[: min(found)[1]]
            self.stopped = True

    def _show(self, end: int) -> str:
        piece = self._decoded[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def _undecided(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._decoded)), longest, -1):
                if self._decoded.endswith(stop[:length]):
                    longest = length
                    break
        return longest
