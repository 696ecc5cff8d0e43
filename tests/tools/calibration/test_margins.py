"""The router's margins against the definition: for every share the most tokens that are expected to keep to it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from via_sd.runtime.decoding.statistics import JudgedMargin
from via_sd.tools.bench.run import Sample
from via_sd.tools.calibration.margins import SHARES, fit_margins, judged_once

JUDGED = st.lists(
    st.builds(
        JudgedMargin,
        position=st.just(0),
        margin=st.sampled_from((0.0, 0.5, 1.0, 2.0, 4.0)) | st.floats(0, 20),
        agreed=st.booleans(),
    ),
    max_size=60,
)


def expected(judged: list[JudgedMargin], margin: float) -> float:
    agreed = [each.agreed for each in judged if each.margin >= margin]
    return (agreed.count(False) + 1) / (len(agreed) + 1)


@given(judged=JUDGED, limit=st.sampled_from((0.01, 0.07, 0.3, 1.0)))
@settings(max_examples=500, derandomize=True, deadline=None)
def test_each_share_gets_the_least_margin_that_keeps_to_it(judged: list[JudgedMargin], limit: float) -> None:
    found = fit_margins(judged, limit)
    assert found.max_divergence == limit
    assert list(found.margins) == sorted(found.margins)
    for share in {*SHARES, limit}:
        fitting = [each.margin for each in judged if expected(judged, each.margin) <= share]
        assert found.margins.get(share, math.inf) == min(fitting, default=math.inf)


@pytest.mark.parametrize("count", [0, 1, 98])
def test_with_little_evidence_little_is_let_through(count: int) -> None:
    assert 0.01 not in fit_margins([JudgedMargin(0, 30.0, True)] * count, 0.01).margins


def test_a_router_that_is_right_wherever_its_margin_is_wide_lets_that_through() -> None:
    judged = [JudgedMargin(0, lead / 100, lead > 150) for lead in range(1000)]
    margins = fit_margins(judged, 0.3).margins
    assert margins[0.002] == 1.51
    assert 1.51 > margins[0.01] > margins[0.05] > margins[0.1] > margins[0.2] == 0.0


def test_a_place_that_several_settings_came_to_is_judged_once() -> None:
    def sample(prompt: int, token_ids: list[int], *positions: int) -> Sample:
        return Sample("", prompt, 0, token_ids, {}, [JudgedMargin(at, 1.0, True) for at in positions])

    first, again, parted, other = (
        sample(0, [1, 2, 3, 4], 1, 2, 3), sample(0, [1, 2, 3, 4], 2, 3), sample(0, [1, 2, 9, 4], 2, 3),
        sample(1, [1, 2, 3, 4], 1),
    )  # fmt: skip
    assert [each.position for each in judged_once([first, again, parted, other])] == [1, 2, 3, 3, 1]
