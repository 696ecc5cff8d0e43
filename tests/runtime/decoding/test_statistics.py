"""The statistics: what `generate --json` prints of them, and that every one of them is documented."""

from __future__ import annotations

from dataclasses import fields

import pytest

from via_sd.runtime.decoding.statistics import Counters, Divergence, Statistics, Times


def test_the_json_of_the_statistics_has_these_keys_in_this_order() -> None:
    counters = Counters("plain")
    counters.emitted("full")
    counters.stop()
    data = counters.statistics().to_json()
    assert list(data) == [
        "mode", "emitted_tokens", "rounds", "drafted_tokens", "evaluated_tokens", "accepted_tokens", "rejection_rate",
        "mean_accepted_length", "accepted_by_position", "tier_counts", "escalations", "escalation_rate", "draft_calls",
        "slim_calls", "full_calls", "full_tokens", "reused_prefix_tokens", "checked_by_full", "divergence", "time_ms",
        "ttft_ms", "tokens_per_s",
    ]  # fmt: skip
    assert data["tier_counts"] == {"draft": 0, "slim": 0, "full": 1}
    assert data["divergence"] == {"checked": 0, "disagreed": 0.0, "rate": None}
    assert list(data["time_ms"]) == ["prefill", "draft", "slim", "full", "wait", "host", "total"]


@pytest.mark.parametrize("kind", [Statistics, Divergence, Times])
def test_every_field_is_documented(kind: type) -> None:
    assert kind.__doc__ is not None
    documented = kind.__doc__.partition("Attributes:")[2]
    assert [field.name for field in fields(kind) if field.name not in documented] == []
