"""The model's own figures on Triton's metrics page.

Counters only grow; a rate or a mean is for the reader to divide, e.g. `via_sd_accepted_tokens_total /
via_sd_drafted_tokens_total` is the acceptance rate, `via_sd_disagreed_tokens_total / via_sd_audited_tokens_total` the
divergence and `via_sd_pass_sequences_total / via_sd_passes_total` the batch size. All carry the labels `model`,
`version` and `instance`. What was generated for a request that ended without an answer is not counted but in
`requests_total`.
"""

from __future__ import annotations

from typing import Any

from via_sd.runtime.batching.batch import PassTotals
from via_sd.runtime.decoding.statistics import TOKEN_TIERS
from via_sd.runtime.triton.dispatcher import Load
from via_sd.runtime.triton.scheduler import Job, Outcome, Reason, RequestFailed

PREFIX = "via_sd_"
COUNTERS = {
    "tokens_total": "Tokens generated, by the tier they came from",
    "drafted_tokens_total": "Tokens that a drafter proposed",
    "accepted_tokens_total": "Drafted tokens that were kept",
    "escalations_total": "Times the router went to the full verifier",
    "audited_tokens_total": "Tokens let through without the full verifier that it has looked at since",
    "disagreed_tokens_total": "Audited tokens that the full verifier would not have chosen",
    "requests_total": "Requests that have ended, by how",
    "queue_us_total": "Microseconds that requests waited for a KV slot",
    "first_token_us_total": "Microseconds from a request's arrival to its first token",
    "passes_total": "Forward passes",
    "pass_sequences_total": "Sequences in forward passes",
    "pass_tokens_total": "Tokens in forward passes",
    "pass_us_total": "Microseconds of forward passes",
}
GAUGES = {
    "active_requests": "Requests that hold a KV slot",
    "waiting_requests": "Requests that wait for a KV slot",
    "slots": "KV slots of this instance",
}


class Metrics:
    """Registers the figures with Triton and counts; to be used from one thread at a time.

    Args:
        pb_utils: Triton's module of that name.
        labels: `model`, `version` and `instance`.
        slots: KV slots of this instance.

    Raises:
        pb_utils.TritonModelException: the server runs with metrics turned off.
    """

    def __init__(self, pb_utils: Any, labels: dict[str, str], slots: int) -> None:
        family = pb_utils.MetricFamily
        self._labels = labels
        self._passes = PassTotals()
        self._families = {
            **{name: family(PREFIX + name, text, family.COUNTER) for name, text in COUNTERS.items()},
            **{name: family(PREFIX + name, text, family.GAUGE) for name, text in GAUGES.items()},
        }
        self._metrics: dict[tuple[str, str], Any] = {}
        for tier in TOKEN_TIERS:
            self._metric("tokens_total", tier=tier)
        for result in ("stop", "length", *(reason.value for reason in Reason)):
            self._metric("requests_total", result=result)
        for name in self._families:
            if name not in ("tokens_total", "requests_total"):
                self._metric(name)
        self._metric("slots").set(slots)

    def _metric(self, name: str, **label: str) -> Any:
        key = (name, *label.values())
        if key not in self._metrics:
            self._metrics[key] = self._families[name].Metric(labels={**self._labels, **label})  # type: ignore[index]
        return self._metrics[key]  # type: ignore[index]

    def _add(self, name: str, amount: float, **label: str) -> None:
        if amount:
            self._metric(name, **label).increment(amount)

    def finished(self, job: Job, outcome: Outcome) -> None:
        """Counts a request that was answered."""
        stats = outcome.stats
        for tier in TOKEN_TIERS:
            self._add("tokens_total", stats.tier_counts[tier], tier=tier)
        self._add("drafted_tokens_total", stats.drafted_tokens)
        self._add("accepted_tokens_total", stats.accepted_tokens)
        self._add("escalations_total", stats.escalations)
        self._add("audited_tokens_total", stats.divergence.checked)
        self._add("disagreed_tokens_total", stats.divergence.disagreed)
        waited = (job.started or job.submitted) - job.submitted
        self._add("queue_us_total", round(1e6 * waited))
        if job.first_token is not None:
            self._add("first_token_us_total", round(1e6 * (job.first_token - job.submitted)))
        self._add("requests_total", 1, result=outcome.finish_reason)

    def failed(self, job: Job, failure: RequestFailed) -> None:
        """Counts a request that ended without an answer."""
        if job.started is not None:
            self._add("queue_us_total", round(1e6 * (job.started - job.submitted)))
        self._add("requests_total", 1, result=failure.reason.value)

    def load(self, load: Load) -> None:
        """Shows how many requests run and wait, and counts the passes since it was last called."""
        self._metric("active_requests").set(load.active)
        self._metric("waiting_requests").set(load.waiting)
        passes, before = load.passes, self._passes
        self._add("passes_total", passes.passes - before.passes)
        self._add("pass_sequences_total", passes.sequences - before.sequences)
        self._add("pass_tokens_total", passes.tokens - before.tokens)
        self._add("pass_us_total", round(1e6 * passes.seconds) - round(1e6 * before.seconds))
        self._passes = passes


class NoMetrics:
    """Counts nothing: for a server that runs with metrics turned off."""

    def finished(self, job: Job, outcome: Outcome) -> None: ...
    def failed(self, job: Job, failure: RequestFailed) -> None: ...
    def load(self, load: Load) -> None: ...
