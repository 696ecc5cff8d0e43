"""The router's margins against the definition: for every share the most tokens that are expected to keep to it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from via_sd.tools.margins import SHARES, calibrate_router

JUDGED = st.lists(st.tuples(st.sampled_from((0.0, 0.5, 1.0, 2.0, 4.0)) | st.floats(0, 20), st.booleans()), max_size=60)


def expected(judged: list[tuple[float, bool]], margin: float) -> float:
    agreed = [same for lead, same in judged if lead >= margin]
    return (agreed.count(False) + 1) / (len(agreed) + 1)


@given(judged=JUDGED, limit=st.sampled_from((0.01, 0.07, 0.3, 1.0)))
@settings(max_examples=500, derandomize=True, deadline=None)
def test_each_share_gets_the_least_margin_that_keeps_to_it(judged: list[tuple[float, bool]], limit: float) -> None:
    found = calibrate_router(judged, limit)
    assert found.max_divergence == limit
    assert list(found.margins) == sorted(found.margins)
    for share in {*SHARES, limit}:
        fitting = [lead for lead, _ in judged if expected(judged, lead) <= share]
        assert found.margins.get(share, math.inf) == min(fitting, default=math.inf)


@pytest.mark.parametrize("count", [0, 1, 98])
def test_with_little_evidence_little_is_let_through(count: int) -> None:
    assert 0.01 not in calibrate_router([(30.0, True)] * count, 0.01).margins


def test_a_router_that_is_right_wherever_its_margin_is_wide_lets_that_through() -> None:
    judged = [(lead / 100, lead > 150) for lead in range(1000)]
    margins = calibrate_router(judged, 0.3).margins
    assert margins[0.002] == 1.51
    assert 1.51 > margins[0.01] > margins[0.05] > margins[0.1] > margins[0.2] == 0.0
