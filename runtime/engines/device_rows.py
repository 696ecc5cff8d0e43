"""Rows whose numbers were computed where their logits lie: a step brings a few bytes per position to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from via_sd.contract.graphs import ARGMAX, GAP, MARGIN, SUM_EXP
from via_sd.errors import LogitsError


class DeviceRow:
    """A row of logits on a device; see `Row`.

    Args:
        numbers: the row's `row_numbers`.
        candidate: the token whose gap is among them.
        fetch: brings the logits to the host, float32 [vocab].
    """

    __slots__ = ("_argmax", "_candidate", "_fetch", "_gap", "_logits", "_margin", "_sum_exp")

    def __init__(self, numbers: Sequence[float], candidate: int, fetch: Callable[[], np.ndarray]) -> None:
        self._argmax, self._sum_exp = int(numbers[ARGMAX]), max(1.0, numbers[SUM_EXP])
        self._margin, self._gap = numbers[MARGIN], numbers[GAP]
        self._candidate, self._fetch = candidate, fetch
        self._logits: np.ndarray | None = None

    def argmax(self) -> int:
        return self._argmax

    def sum_exp(self) -> float:
        return self._sum_exp

    def margin(self) -> float:
        return self._margin

    def is_finite(self) -> bool:
        return True  # a row is made of no other numbers

    def gap(self, token: int) -> float:
        if token == self._candidate:
            return self._gap
        if token == self._argmax:
            return 0.0
        return float(self.logits[token]) - float(self.logits[self._argmax])

    @property
    def logits(self) -> np.ndarray:
        if self._logits is None:
            self._logits = self._fetch()
        return self._logits

    def keep(self) -> None:
        """Bring the logits to memory of the row's own, before another step is written over them."""
        self._logits = self.logits.copy()


def device_rows(numbers: np.ndarray, candidates: Sequence[int], fetch: Callable[[int], np.ndarray]) -> list[DeviceRow]:
    """The rows of one step.

    Args:
        numbers: float32 [rows, 4].
        candidates: for each row the token that its gap is of.
        fetch: brings the logits of a row, by index, to the host, float32 [vocab].

    Raises:
        LogitsError: a row with NaN or Inf among its logits.
    """
    if not (numbers[:, SUM_EXP] > 0.5).all():  # the largest logit alone contributes exp(0), give or take a rounding
        raise LogitsError(
            "a step gave NaN or Inf among its logits; if the engines are float16, activations may exceed its range: "
            "build them with --dtype bf16 or fp32"
        )
    rows = zip(numbers.tolist(), candidates, strict=True)
    return [DeviceRow(row, candidate, partial(fetch, index)) for index, (row, candidate) in enumerate(rows)]
