"""Rows on a device: decoding reads their numbers, and whole rows of logits where it samples."""

from __future__ import annotations

import numpy as np
import pytest

from via_sd.errors import LogitsError
from via_sd.runtime.engines.device_rows import device_rows


def test_logits_are_fetched_once_and_only_for_a_token_nothing_is_known_of():
    logits = np.array([[1.0, 4.0, 2.0], [0.0, -1.0, 3.0]], np.float32)
    fetched: list[int] = []

    def fetch(row: int) -> np.ndarray:
        fetched.append(row)
        return logits[row]

    first, second = device_rows(np.array([[1, 1.18, -3, 2], [2, 1.07, -4, 3]], np.float32), [0, 1], fetch)
    assert (first.argmax(), first.gap(1), first.gap(0), first.margin()) == (1, 0, -3, 2)
    assert (second.argmax(), second.sum_exp(), second.gap(1), second.margin()) == (2, pytest.approx(1.07), -4, 3)
    assert fetched == []
    assert first.gap(2) == -2
    assert (first.logits == logits[0]).all()
    assert fetched == [0]


def test_a_row_that_is_kept_outlives_what_is_written_over_it():
    logits = np.array([[1.0, 4.0, 2.0]], np.float32)
    (row,) = device_rows(np.array([[1, 1.18, -3, 2]], np.float32), [0], lambda index: logits[index])
    row.keep()
    logits[:] = np.nan
    assert row.logits.tolist() == [1, 4, 2]


def test_a_sum_that_a_device_rounds_below_one_is_one():
    (row,) = device_rows(np.array([[1, 0.999997, -30, 30]], np.float32), [0], lambda index: np.zeros(3, np.float32))
    assert row.sum_exp() == 1


@pytest.mark.parametrize("mass", [np.nan, 0.0])
def test_logits_that_are_no_numbers_are_an_error_not_a_token(mass):
    numbers = np.array([[1, 1.2, 0, 2], [5, mass, 0, 1]], np.float32)
    with pytest.raises(LogitsError, match=r"NaN or Inf.*--dtype bf16 or fp32"):
        device_rows(numbers, [0, 0], lambda row: np.zeros(3, np.float32))
