"""A running ratio is the ratio of its weighted sums, of which older evidence fades and the prior does not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from via_sd.runtime.decoding.running_ratio import RunningRatio

EVIDENCE = st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 10), st.integers(1, 4)), min_size=1, max_size=20)


@given(evidence=EVIDENCE, memory=st.floats(0.1, 1), prior=st.floats(0, 2), weight=st.floats(0, 8))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_the_value_is_the_ratio_of_the_faded_sums_and_the_prior(
    evidence: list[tuple[float, float, int]], memory: float, prior: float, weight: float
) -> None:
    ratio = RunningRatio(memory, prior, weight)
    for amount, units, steps in evidence:
        ratio.add(amount, units, steps=steps)
    amounts, spans = prior * weight, weight
    for index, (amount, units, _) in enumerate(evidence):
        kept = memory ** sum(steps for _, _, steps in evidence[index + 1 :])
        amounts += kept * amount
        spans += kept * units
    assert ratio.value == pytest.approx(amounts / spans)


def test_without_evidence_the_value_is_the_prior_and_it_comes_back_when_evidence_fades() -> None:
    ratio = RunningRatio(0.5, prior=0.8, weight=2.0)
    assert ratio.value == pytest.approx(0.8)
    ratio.add(0.0, 10.0)
    assert ratio.value < 0.2
    for _ in range(40):
        ratio.fade()
    assert ratio.value == pytest.approx(0.8)
    ratio.add(4.0, 2.0)
    ratio.fade(0.0)
    assert ratio.value == pytest.approx(0.8)
