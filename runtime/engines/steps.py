"""How a pass is cut into steps that the engines were built for: sizes only, nothing that needs a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from via_sd.errors import BundleError

#: The number of cache positions a step attends to is a multiple of this, so that few sizes occur (each may be compiled
#: or captured once).
VISIBLE_BUCKET = 256


@dataclass(frozen=True)
class Step:
    """Tokens `start` to `start + count` of a pass, and how many of the last of them get logits that are kept."""

    start: int
    count: int
    keep: int

    @property
    def rows(self) -> list[int]:
        """Indices, within the step, of the rows of logits to compute: at least one, which no one may want."""
        return list(range(self.count - max(1, self.keep), self.count))

    def candidates(self, tokens: Sequence[int]) -> list[int]:
        """For each row the token that follows it in the pass `tokens`, the one it may have to judge; 0 for the last."""
        rows = self.rows
        following = [*tokens[self.start + rows[0] + 1 : self.start + self.count + 1], 0]
        return following[: len(rows)]


class StepPlanner:
    """Cuts passes for one model's engines.

    Args:
        profiles: the model's optimisation profiles as engines.json lists them, in order.
        max_seq_len: capacity of the KV buffers in tokens.
    """

    def __init__(self, profiles: Sequence[dict[str, Any]], max_seq_len: int) -> None:
        self._profiles = profiles
        self.max_seq_len = max_seq_len
        self.max_tokens = max(profile["tokens"][2] for profile in profiles)
        self.max_rows = max(profile["rows"][2] for profile in profiles)

    def cut(self, count: int, rows: int) -> list[Step]:
        """The steps of a pass of `count` tokens of which the last `rows` get logits."""
        tail: list[Step] = []
        while rows > self.max_rows:
            # Its last rows need a step of their own: no step computes as many.
            size = min(self.max_rows, self._largest(self.max_rows))
            tail.insert(0, Step(count - size, size, size))
            count, rows = count - size, rows - size
        last = min(count, self._largest(rows))
        head = count - last
        steps = [Step(start, min(self.max_tokens, head - start), 0) for start in range(0, head, self.max_tokens)]
        return [*steps, Step(head, last, rows), *tail]

    def profile(self, count: int, rows: int, visible: int) -> int:
        """Index of the first profile that a step of `count` tokens and `rows` rows fits.

        Raises:
            BundleError: none does.
        """
        sizes = {"tokens": count, "rows": rows, "visible": visible}
        for index, profile in enumerate(self._profiles):
            if all(profile[name][0] <= size <= profile[name][2] for name, size in sizes.items()):
                return index
        raise BundleError(
            f"no profile takes a step of {count} tokens and {rows} rows: built were "
            f"{', '.join(self._describe(profile) for profile in self._profiles)}; build with a smaller MIN in --tokens"
        )

    def visible(self, end: int) -> int:
        """How many cache positions a step that ends before position `end` attends to."""
        return min(-(-end // VISIBLE_BUCKET) * VISIBLE_BUCKET, self.max_seq_len)

    def _largest(self, rows: int) -> int:
        """Most tokens of a step that computes `rows` rows."""
        return max(int(profile["tokens"][2]) for profile in self._profiles if profile["rows"][2] >= rows)

    @staticmethod
    def _describe(profile: dict[str, Any]) -> str:
        (low, _, high), most = profile["tokens"], profile["rows"][2]
        return f"{profile['name']} ({low} to {high} tokens, {most} rows at most)"
