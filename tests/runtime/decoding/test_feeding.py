"""What is fed to which tier after each event, and what is cached for every tier then: docs/architecture.md#cache-table.

Full and slim follow the alphabet, except where a test's script says otherwise. Each chunk of a stream is one round.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.pipelines import LETTERS, ScriptedDrafter, WatchedPipeline, table_pipeline
from tests.support.table_engine import Call, TableEngine, scripted_logits
from via_sd.contract.generation_options import for_mode
from via_sd.runtime import Chunk
from via_sd.runtime.decoding.statistics import Statistics
from via_sd.runtime.generation.stream import CompletionStream

VOCAB = 26
#: A script in letters: tier -> last letter -> (next letter, its probability).
Script = Mapping[str, Mapping[str, tuple[str, float]]]


class Scene:
    """A stream over scripted tiers, and what its buffers were fed since the last look."""

    def __init__(
        self,
        directory: Path,
        script: Script,
        *blocks: str,
        draft_with: Any = None,
        eos: Sequence[int] = (),
        **options: Any,
    ) -> None:
        logits = scripted_logits(
            VOCAB, {t: {ids(k): (ids(v), p) for k, (v, p) in s.items()} for t, s in script.items()}
        )
        self.engine = TableEngine(logits, VOCAB, 64)
        self.pipeline: WatchedPipeline = table_pipeline(
            self.engine, directory, draft_with=draft_with or "ngram", eos=eos
        )
        if draft_with is None:
            self.pipeline.replacement = lambda *_: ScriptedDrafter(*([ids(x) for x in block] for block in blocks))
        self.cancel = threading.Event()
        given = {"raw": True, "gamma": 8, "max_new_tokens": 40, "router": "paper", **options}
        self.stream: CompletionStream = self.pipeline.stream("a", cancel=self.cancel, **for_mode(given))
        self._looked = 0

    def round(self) -> tuple[str, list[str]]:
        """Run one round: the letters it emitted, and their tiers."""
        chunk: Chunk = next(self.stream)
        return "".join(LETTERS[t] for t in chunk.token_ids), chunk.tiers

    def fed(self) -> list[Call]:
        """The calls since the last look."""
        calls = self.engine.buffers[0].calls
        start, self._looked = self._looked, len(calls)
        return calls[start:]

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Cached lengths of full, slim and the deepest tier."""
        lengths = self.pipeline.current.verifier.lengths
        return lengths["full"], lengths["slim"], lengths["deep"]

    def stats(self) -> Statistics:
        for _ in self.stream:
            pass
        return self.stream.completion.stats


def ids(letter: str) -> int:
    return LETTERS.index(letter)


def call(tier: str, letters: str, past: int, rows: int) -> Call:
    return Call(tier, tuple(ids(x) for x in letters), past, rows)


def test_the_prompt_goes_to_full_which_emits_the_first_token(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {}, mode="routed")
    assert scene.round() == ("b", ["full"])
    assert scene.fed() == [call("full", "a", 0, 1)]
    assert scene.lengths == (1, 1, 1)


def test_a_block_slim_accepts_whole_is_followed_by_slims_own_token(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {}, "cdef", "hi", mode="routed")
    scene.round(), scene.fed()
    assert scene.round() == ("cdefg", ["draft"] * 4 + ["slim"])
    assert scene.fed() == [call("slim", "bcdef", 1, 5)]
    assert scene.lengths == (1, 6, 6)
    # The next pass begins with what is not cached for slim: its own last token.
    assert scene.round() == ("hij", ["draft", "draft", "slim"])
    assert scene.fed() == [call("slim", "ghi", 6, 3)]
    assert scene.lengths == (1, 9, 9)


def test_an_accepted_block_ends_the_round_where_slim_is_unsure_of_its_own_token(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"slim": {"d": ("e", 0.6)}}, "cd", mode="routed", max_new_tokens=5)
    scene.round(), scene.fed()
    assert scene.round() == ("cd", ["draft", "draft"])
    assert scene.lengths == (1, 3, 3), "the last emitted token counts as fed to nobody"
    scene.fed()
    # With nothing drafted and slim unsure, the next round belongs to full: it is fed all that is not cached for it.
    assert scene.round() == ("e", ["full"])
    assert scene.fed() == [call("slim", "d", 3, 1), call("full", "bcd", 1, 3)]
    assert scene.lengths == (4, 4, 4)
    assert scene.stats().escalations == 1


def test_regenerate_emits_the_draft_before_it_and_slims_token_and_voids_the_rest(tmp_path: Path) -> None:
    # The example of docs/statistics.md: gamma 4, draft a b c d, slim accepts a b and regenerates x.
    scene = Scene(tmp_path, {"slim": {"d": ("x", 0.9)}}, "cdef", mode="routed")
    scene.round(), scene.fed()
    scene.cancel.set()
    assert scene.round() == ("cdx", ["draft", "draft", "slim"])
    assert scene.fed() == [call("slim", "bcdef", 1, 5)]
    assert scene.lengths == (1, 4, 4)
    stats = scene.stats()
    assert (stats.drafted_tokens, stats.evaluated_tokens, stats.accepted_tokens) == (4, 3, 2)
    assert stats.rejection_rate == pytest.approx(1 / 3)
    assert stats.mean_accepted_length == 2
    assert stats.accepted_by_position == [1, 1, 0]
    assert stats.tier_counts == {"draft": 2, "slim": 1, "full": 1}
    assert stats.checked_by_full == 0.25


def test_escalate_feeds_full_what_is_not_cached_and_the_whole_rest_of_the_block(tmp_path: Path) -> None:
    script: Script = {"slim": {"h": ("i", 0.5)}, "full": {"j": ("z", 0.9)}}
    scene = Scene(tmp_path, script, "cdef", "hijk", mode="routed")
    scene.round(), scene.round(), scene.fed()
    # slim lets h through, is unsure about i, and full takes i and j, and writes z for k.
    assert scene.round() == ("hijz", ["draft", "draft", "draft", "full"])
    assert scene.fed() == [call("slim", "ghijk", 6, 5), call("full", "bcdefghijk", 1, 10)]
    assert scene.lengths == (10, 10, 10)


def test_escalate_at_the_first_token_leaves_the_block_to_full(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"slim": {"b": ("c", 0.5)}, "full": {"c": ("q", 0.9)}}, "cde", mode="routed")
    scene.round(), scene.fed()
    assert scene.round() == ("cq", ["draft", "full"])
    assert scene.fed() == [call("slim", "bcde", 1, 4), call("full", "bcde", 1, 4)]
    assert scene.lengths == (3, 3, 3)


def test_a_round_that_would_exceed_max_lag_goes_to_full(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {}, "cdef", "hij", mode="routed", max_lag=8)
    scene.round(), scene.round(), scene.fed()
    assert scene.lengths == (1, 6, 6)
    assert scene.round() == ("hijk", ["draft"] * 3 + ["full"])
    assert scene.fed() == [call("full", "bcdefghij", 1, 9)]
    assert scene.lengths == (10, 10, 10)


def test_a_two_tier_round_feeds_full_the_last_token_and_the_draft(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"full": {"d": ("x", 0.9)}}, "cdef", "yz", mode="speculative")
    scene.round(), scene.fed()
    assert scene.round() == ("cdx", ["draft", "draft", "full"])
    assert scene.fed() == [call("full", "bcdef", 1, 5)]
    assert scene.lengths == (4, 4, 4)
    assert scene.round() == ("yza", ["draft", "draft", "full"])
    assert scene.fed() == [call("full", "xyz", 4, 3)]
    assert scene.lengths == (7, 7, 7)


def test_a_cascade_round_lets_slim_verify_blocks_and_full_test_all_of_them(tmp_path: Path) -> None:
    script: Script = {"slim": {"d": ("x", 0.9)}, "full": {"x": ("p", 0.9), "d": ("x", 0.9)}}
    scene = Scene(tmp_path, script, "cdef", "yz", mode="cascade")
    scene.round(), scene.fed()
    emitted, tiers = scene.round()
    calls = scene.fed()
    # slim keeps c d and writes x, then keeps y z and writes a; full keeps c d x and writes p.
    assert calls[:2] == [call("slim", "bcdef", 1, 5), call("slim", "xyz", 4, 3)]
    assert calls[-1].tier == "full"
    assert calls[-1].tokens[:7] == tuple(map(ids, "bcdxyza"))
    assert (calls[-1].past, calls[-1].rows) == (1, len(calls[-1].tokens))
    assert (emitted, tiers) == ("cdxp", ["draft", "draft", "slim", "full"])
    assert scene.lengths == (5, 5, 5)


def test_a_cascade_round_goes_to_full_as_soon_as_slim_has_ended_the_text(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {}, "c", eos=[ids("d")], mode="cascade")
    scene.round(), scene.fed()
    assert scene.round() == ("cd", ["draft", "slim"])
    assert scene.fed() == [call("slim", "bc", 1, 2), call("full", "bcd", 1, 3)]


def test_a_mask_drafter_feeds_behind_what_higher_tiers_have_cached_and_slim_writes_over_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"slim": {"d": ("x", 0.9)}}, draft_with="mask", mode="routed", gamma=3)
    scene.round(), scene.fed()
    assert scene.round() == ("cdx", ["draft", "draft", "slim"])
    drafting = [call("deep", "b", 1, 1), call("deep", "c", 2, 1), call("deep", "d", 3, 1)]
    assert scene.fed() == [*drafting, call("slim", "bcde", 1, 4)]
    assert scene.lengths == (1, 4, 4)
    scene.round()
    assert scene.fed()[0] == call("deep", "x", 4, 1)


def test_a_model_drafter_keeps_a_counter_of_its_own(tmp_path: Path) -> None:
    model = TableEngine(scripted_logits(VOCAB, {}), VOCAB, 64, ("full",))
    scene = Scene(tmp_path, {"full": {"d": ("x", 0.9)}}, draft_with=model, mode="speculative", gamma=4)
    scene.round()
    assert scene.round() == ("cdx", ["draft", "draft", "full"])
    calls = model.buffers[0].calls
    assert calls == [call("full", "ab", 0, 1), *(call("full", letter, 2 + i, 1) for i, letter in enumerate("cde"))]
    drafter = scene.pipeline.current.drafter
    assert drafter is not None
    assert drafter.lengths["full"] == 4, "c and d were kept, e was not"
    scene.round()
    assert calls[4] == call("full", "x", 4, 1)
