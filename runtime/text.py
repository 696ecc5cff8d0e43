"""From token ids to text as it grows: whole characters only, stop strings held back until they are certain."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """Decodes tokens one by one and looks for stop strings across their borders.

    The text shown so far never has to be taken back: half a character waits for its other bytes, and text that may be
    the beginning of a stop string waits until it is or is not one.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(s for s in stop if s)
        self._ids: list[int] = []
        self._decoded = ""
        self._shown = 0
        self.stopped = False

    def push(self, token: int) -> bool:
        """Take one token; False if it completed a stop string (the text then ends before that string)."""
        self._ids.append(token)
        piece = self._stream.step(self._tokenizer, token)
        if piece:
            start = max(0, len(self._decoded) - max((len(s) for s in self._stop), default=0))
            self._decoded += piece
            found = [at for s in self._stop if (at := self._decoded.find(s, start)) >= 0]
            if found:
                self._decoded = self._decoded[: min(found)]
                self.stopped = True
        return not self.stopped

    def take(self) -> str:
        """The text that is certain and was not taken yet."""
        end = len(self._decoded) - (0 if self.stopped else self._undecided())
        piece = self._decoded[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def finish(self) -> str:
        """The rest of the text, once no token follows; bytes that never became a character are shown as U+FFFD."""
        if not self.stopped:
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
            if whole.startswith(self._decoded):
                self._decoded = whole
        self.stopped = True
        return self.take()

    @property
    def text(self) -> str:
        """All text taken so far."""
        return self._decoded[: self._shown]

    def _undecided(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._decoded)), longest, -1):
                if self._decoded.endswith(stop[:length]):
                    longest = length
                    break
        return longest
