"""Whatever a request asks for and however its rounds go: token ids, tiers, text, finish reason and counts agree."""

from __future__ import annotations

import threading
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.support.pipelines import LETTERS, AdversarialDrafter, WatchedPipeline, table_pipeline
from tests.support.table_engine import TableEngine, digest_of, hashed_logits
from via_sd.contract.generation_options import for_mode
from via_sd.runtime import EXACT_MODES, Completion, GenerationConfig
from via_sd.runtime.decoding.audit import Audit
from via_sd.runtime.decoding.drafters import Draft
from via_sd.runtime.decoding.router import RouterMargins
from via_sd.runtime.decoding.run import Item, Run
from via_sd.runtime.decoding.sampling import Processor
from via_sd.runtime.decoding.statistics import Divergence
from via_sd.runtime.engines.rows import HostRow, Row
from via_sd.runtime.generation.policy import Policy

VOCAB = 7
CAPACITY = 72
MODES = ("plain", "speculative", "cascade", "routed")
POLICY = Policy(
    {"mode": "plain"},
    "plain",
    {1: 1.0, 8: 1.5},
    slim_cost={1: 0.4, 8: 0.6},
    router=RouterMargins(0.1, {0.0: 2.0, 0.1: 0.5}),
)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    greedy = draw(st.booleans())
    router = draw(st.sampled_from(("paper", "adaptive", "calibrated")))
    thresholds = {
        "alpha1": draw(st.sampled_from((0.0, 0.5, 1.0))),
        "alpha2": draw(st.sampled_from((0.0, 0.3, 0.7, 1.0))),
    }
    return {
        **(thresholds if router != "calibrated" else {}),
        "raw": True,
        "seed": draw(st.integers(0, 2**64 - 1)),
        "max_new_tokens": draw(st.integers(1, 80)),
        "temperature": 0.0 if greedy else draw(st.floats(0.3, 2.0)),
        "top_k": draw(st.sampled_from((0, 0, 2, 5))),
        "top_p": draw(st.sampled_from((1.0, 1.0, 0.8))),
        "min_p": draw(st.sampled_from((0.0, 0.0, 0.2))),
        "repetition_penalty": draw(st.sampled_from((1.0, 1.0, 1.5))),
        "stop": draw(st.lists(st.text(LETTERS[:VOCAB], min_size=1, max_size=3), max_size=2)),
        "ignore_eos": draw(st.booleans()),
        "gamma": draw(st.one_of(st.none(), st.integers(1, 12))),
        "router": router,
        "max_lag": draw(st.integers(1, 40)),
        "max_divergence": draw(st.sampled_from((None, 0.0, 0.1))),
        "audit_tail": draw(st.booleans()),
        "keep_margins": draw(st.booleans()),
        "logprobs": draw(st.sampled_from((None, 0, 3))),
    }


@pytest.mark.parametrize("kind", ["ngram", "mask", "model", "adversarial"])
@pytest.mark.parametrize("mode", MODES)
def test_everything_a_completion_says_agrees(mode: str, kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("pipelines")

    @given(
        request=requests(),
        prompt=st.text(LETTERS[:VOCAB], min_size=1, max_size=CAPACITY - 1),
        eos=st.sets(st.integers(0, VOCAB - 1), max_size=2),
        slim=st.sampled_from((0.0, 0.4)),
        cancel_after=st.one_of(st.none(), st.integers(0, 6)),
    )
    @settings(max_examples=150, derandomize=True, deadline=None)
    def check(request: dict[str, Any], prompt: str, eos: set[int], slim: float, cancel_after: int | None) -> None:
        logits = hashed_logits(VOCAB, slim=slim)
        engine = TableEngine(logits, VOCAB, CAPACITY)
        model = TableEngine(lambda tier, *at: logits("slim", *at), VOCAB, CAPACITY, ("full",))
        draft_with = {"mask": "mask", "model": model}.get(kind, "ngram")
        pipeline = table_pipeline(engine, directory, draft_with=draft_with, eos=eos, policy=POLICY)
        if kind == "adversarial":
            sampled = request["temperature"] > 0
            pipeline.replacement = lambda *_: AdversarialDrafter(VOCAB, lambda s: s[-1], len(prompt), sampled=sampled)
        cancel = threading.Event()
        stream = pipeline.stream(prompt, cancel=cancel, **for_mode({"mode": mode, **request}))
        text, tokens, tiers, reason = "", [], [], None
        for number, chunk in enumerate(stream):
            assert reason is None, "nothing follows the chunk that names the finish reason"
            text, tokens, tiers = text + chunk.text, tokens + chunk.token_ids, tiers + chunk.tiers
            reason = chunk.finish_reason
            # Streamed text is never taken back, and never longer than what was emitted.
            assert "".join(LETTERS[t] for t in tokens).startswith(text)
            assert len(pipeline.encode(prompt)) + len(tokens) - pipeline.current.verifier.lengths["full"] <= max(
                1, request["max_lag"]
            )
            if number == cancel_after:
                cancel.set()
        found = stream.completion
        assert (found.text, found.token_ids, found.tiers, found.finish_reason) == (text, tokens, tiers, reason)
        event(f"finish reason {reason}")
        _check_ending(found, request, prompt, eos, cancelled=cancel.is_set())
        _check_counts(found, engine, model, request)
        if request["temperature"] == 0:
            _check_divergence(found, logits, request, [LETTERS.index(x) for x in prompt])

    check()


def _check_ending(found: Completion, request: dict[str, Any], prompt: str, eos: set[int], *, cancelled: bool) -> None:
    letters = "".join(LETTERS[t] for t in found.token_ids)
    limit = min(request["max_new_tokens"], CAPACITY - len(prompt))
    stops = [] if request["ignore_eos"] else [at + 1 for at, token in enumerate(found.token_ids) if token in eos]
    cuts = [(at + len(s), at) for s in request["stop"] if (at := letters.find(s)) >= 0]
    assert 1 <= len(letters) <= limit
    if found.finish_reason == "stop":
        ends = [(end, end - 1) for end in stops] + cuts
        assert ends
        # An end-of-sequence token is no text, and so completes no stop string.
        end, cut = min(ends, key=lambda each: each[0])
        assert end == len(letters), "nothing follows the token that ended the text"
        assert found.text == letters[:cut]
    else:
        assert not stops
        assert not cuts
        assert found.text == letters
        assert (found.finish_reason == "length") == (len(letters) == limit)
        assert found.finish_reason == "length" or cancelled


def _check_counts(found: Completion, engine: TableEngine, model: TableEngine, request: dict[str, Any]) -> None:
    stats, emitted = found.stats, len(found.token_ids)
    assert stats.mode in MODES
    assert stats.emitted_tokens == emitted == len(found.tiers) == sum(stats.tier_counts.values())
    assert {tier: found.tiers.count(tier) for tier in ("draft", "slim", "full")} == stats.tier_counts
    assert found.tiers[0] == "full"
    assert stats.accepted_tokens == stats.tier_counts["draft"]
    assert stats.accepted_tokens <= stats.evaluated_tokens <= stats.drafted_tokens
    if stats.evaluated_tokens:
        assert stats.rejection_rate == pytest.approx(1 - stats.accepted_tokens / stats.evaluated_tokens)
    else:
        assert stats.rejection_rate is None
    assert stats.escalation_rate == pytest.approx(stats.escalations / emitted)
    calls = engine.buffers[0].calls
    # A final audit comes after the statistics of the text; it is a measurement, not a part of it.
    tail = calls[-1:] if request["audit_tail"] and stats.full_calls < sum(c.tier == "full" for c in calls) else []
    told = calls[: len(calls) - len(tail)]
    full = [c for c in told if c.tier == "full"]
    assert stats.full_calls == len(full)
    assert stats.full_tokens == sum(len(c.tokens) for c in full)
    assert stats.slim_calls == sum(c.tier == "slim" for c in told)
    drafting = [c for kv in model.buffers for c in kv.calls] or [c for c in told if c.tier == "deep"]
    assert stats.draft_calls == len(drafting)
    assert 1 <= stats.rounds <= emitted
    if stats.mode in EXACT_MODES:
        assert stats.checked_by_full == 1
        assert stats.divergence == Divergence(checked=0, disagreed=0, rate=None)
    if stats.mode == "plain":
        assert (stats.rounds, stats.drafted_tokens, stats.full_calls) == (emitted, 0, emitted)
    if stats.mode == "routed" and request["keep_margins"]:
        assert len(found.margins) == stats.divergence.checked + stats.escalations
    else:
        assert found.margins == []
    if stats.mode == "routed" and request["audit_tail"] and found.finish_reason != "cancelled":
        assert stats.checked_by_full == 1
    times = asdict(stats.time_ms)
    assert min(times.values()) >= 0
    assert sum(times[k] for k in ("prefill", "draft", "slim", "full", "wait", "host")) == pytest.approx(
        times["total"], abs=1e-6
    )
    if request["logprobs"] is not None:
        assert found.logprobs is not None
        assert [len(entry.top) for entry in found.logprobs] == [request["logprobs"]] * emitted
    else:
        assert found.logprobs is None


def _check_divergence(found: Completion, logits: Any, request: dict[str, Any], prompt: list[int]) -> None:
    """Brute force, where full has judged every token: those that are not its argmax."""
    if found.stats.mode != "routed" or found.stats.checked_by_full < 1:
        return
    processor = Processor(GenerationConfig(repetition_penalty=request["repetition_penalty"]))
    apart = 0
    for at, token in enumerate(found.token_ids):
        before = prompt + found.token_ids[:at]
        row = logits("full", tuple(before[-4:]), digest_of(before))
        apart += processor.best(HostRow(row), before) != token
    event("diverged" if apart else "did not diverge")
    assert found.stats.divergence.disagreed == apart


def test_divergence_at_temperature_is_what_the_two_laws_do_not_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = hashed_logits(VOCAB, sharpness=1.5, slim=0.5)
    pipeline: WatchedPipeline = table_pipeline(TableEngine(logits, VOCAB, CAPACITY), tmp_path)
    params = GenerationConfig(temperature=0.9, top_p=0.9)
    unchecked: list[int] = []
    push = Run.emit

    def spy(run: Run, item: Item, row: Row, *, checked: bool = True) -> bool:
        if not checked:
            unchecked.append(len(run.state.tokens))
        return push(run, item, row, checked=checked)

    monkeypatch.setattr(Run, "emit", spy)
    audited = 0
    for seed in range(20):
        unchecked.clear()
        found = pipeline.generate(
            "abcabc", mode="routed", temperature=0.9, top_p=0.9, seed=seed, alpha2=0.8, max_new_tokens=50, raw=True,
            audit_tail=True, router="paper",
        )  # fmt: skip
        tokens = [*pipeline.encode("abcabc"), *found.token_ids]
        apart = 0.0
        for at in unchecked:
            full, slim = (
                Processor(params).probabilities(
                    HostRow(logits(tier, tuple(tokens[at - 4 : at]), digest_of(tokens[:at]))), tokens[:at]
                )
                for tier in ("full", "slim")
            )
            apart += 1 - float(np.minimum(full, slim).sum())
        assert found.stats.divergence.checked == len(unchecked)
        assert found.stats.divergence.disagreed == pytest.approx(apart)
        audited += len(unchecked)
    assert audited > 300


def test_margins_are_slims_wherever_it_was_asked_and_say_what_full_thought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = hashed_logits(VOCAB, slim=0.4)
    pipeline: WatchedPipeline = table_pipeline(TableEngine(logits, VOCAB, CAPACITY), tmp_path)
    asked: list[int] = []
    push, escalate = Run.emit, Audit.escalate

    def pushed(run: Run, item: Item, row: Row, *, checked: bool = True) -> bool:
        if not checked:
            asked.append(len(run.state.tokens))
        return push(run, item, row, checked=checked)

    def escalated(audit: Audit, draft: Draft, doubted: Row | None = None) -> int:
        if doubted is not None:
            asked.append(len(audit._run.state.tokens))
        return escalate(audit, draft, doubted)

    monkeypatch.setattr(Run, "emit", pushed)
    monkeypatch.setattr(Audit, "escalate", escalated)
    agreed = []
    for prompt in ("abcabc", "gfed", "aab"):
        asked.clear()
        found = pipeline.generate(
            prompt, mode="routed", alpha2=0.7, max_new_tokens=50, raw=True, audit_tail=True, router="paper",
            keep_margins=True,
        )  # fmt: skip
        tokens = [*pipeline.encode(prompt), *found.token_ids]
        wanted = []
        for at in asked:
            full, slim = (
                logits(tier, tuple(tokens[max(0, at - 4) : at]), digest_of(tokens[:at])) for tier in ("full", "slim")
            )
            second, first = np.sort(slim)[-2:]
            position = at - len(tokens) + len(found.token_ids)
            wanted.append((position, pytest.approx(first - second), full.argmax() == slim.argmax()))
        assert [astuple(each) for each in found.margins] == wanted
        agreed += [each.agreed for each in found.margins]
    assert 20 < sum(agreed) < len(agreed) - 20
