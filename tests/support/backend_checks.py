"""What every backend must do: whatever is fed, forgotten and fed again, its logits and KV are the routed graph's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny import MAX_SEQ_LEN
from via_sd.runtime.engines.protocol import Engine
from via_sd.runtime.engines.rows import HostRow, Row, logits_of

#: (tier, tokens fed, rows asked for) or ("rollback", positions taken back, -).
ACTIONS = st.lists(
    st.tuples(st.sampled_from(("full", "slim", "rollback")), st.integers(1, 90), st.integers(1, 90)),
    min_size=1,
    max_size=6,
)


@given(actions=ACTIONS, seed=st.integers(0, 99))
@settings(max_examples=40, derandomize=True, deadline=None)
def check_against_the_routed_graph(
    found: Engine, wanted: Engine, actions: list[tuple[str, int, int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    both, past = (found.new_buffers(), wanted.new_buffers()), 0
    for action, count, rows in actions:
        if action == "rollback":
            past = max(0, past - count)
            continue
        count = min(count, MAX_SEQ_LEN - past)
        if count == 0:
            continue
        tokens = rng.integers(0, 256, count).tolist()
        ours, theirs = (buffers.forward(action, tokens, past, min(rows, count)) for buffers in both)
        check_numbers(ours, [*tokens[len(tokens) - len(ours) + 1 :], 0])
        assert_close(logits_of(ours), logits_of(theirs))
        past += count
    for layer in range(found.kv["num_layers"]):
        assert_close(*(buffers.keys_values(layer)[:, :, :past] for buffers in both))


def check_numbers(rows: Sequence[Row], following: Sequence[int]) -> None:
    """Every row says of itself what its logits say, also of the token that follows it and of any other."""
    said = [
        (row.argmax(), row.sum_exp(), row.gap(token), row.margin()) for row, token in zip(rows, following, strict=True)
    ]
    for row, token, (best, mass, gap, margin) in zip(rows, following, said, strict=True):
        wanted = HostRow(row.logits)
        assert best == wanted.argmax()
        assert mass == pytest.approx(wanted.sum_exp(), rel=1e-5)
        assert gap == pytest.approx(wanted.gap(token), abs=1e-5)
        assert margin == pytest.approx(wanted.margin(), abs=1e-5)
        assert row.gap(best) == 0
        assert row.gap(7) == pytest.approx(wanted.gap(7), abs=1e-5)


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max(initial=0) < 1e-4 * max(1.0, np.abs(wanted).max(initial=0))
