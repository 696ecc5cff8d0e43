"""Passes over several sequences: each gets what it gets alone, and idle ones keep what they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.pipelines import WatchedPipeline
from tests.support.tiny import MAX_SEQ_LEN
from via_sd.contract.graphs import FULL
from via_sd.contract.manifest import load_bundle
from via_sd.errors import BusyError
from via_sd.runtime import Pipeline
from via_sd.runtime.decoding.cache import SequenceCache
from via_sd.runtime.decoding.passes import complete
from via_sd.runtime.engines.backends import open_engines
from via_sd.runtime.engines.ort import OrtEngine
from via_sd.runtime.engines.protocol import Block
from via_sd.runtime.engines.rows import logits_of

TOLERANCE = 2e-5
SEQUENCES = 4
#: Per pass: its tier, and how many tokens each sequence takes part with; 0: it does not, negative: it rolls back first.
PASSES = st.lists(
    st.tuples(st.sampled_from(("full", "slim", "deep")), st.tuples(*[st.integers(-8, 20)] * SEQUENCES)),
    min_size=1,
    max_size=10,
)


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).max()


@given(passes=PASSES, seed=st.integers(0, 99))
@settings(max_examples=60, derandomize=True, deadline=None)
def check_batches_against_single_sequences(pipeline: WatchedPipeline, passes: list[Any], seed: int) -> None:
    engine = pipeline.verifier
    rng = np.random.default_rng(seed)
    together = [engine.new_buffers() for _ in range(SEQUENCES)]
    alone = [SequenceCache(engine.new_buffers(), engine) for _ in range(SEQUENCES)]
    texts: list[list[int]] = [[int(rng.integers(256))] for _ in range(SEQUENCES)]
    for tier, counts in passes:
        blocks, wanted, places = [], [], []
        for i, count in enumerate(counts):
            cache, text = alone[i], texts[i]
            if count < 0:
                del text[max(1, len(text) + count) :]
                cache.truncate(len(text))
            text += rng.integers(0, 256, min(abs(count), MAX_SEQ_LEN - len(text))).tolist()
            past = cache.lengths[tier]
            if count == 0 or past == len(text):
                continue
            rows = int(rng.integers(1, len(text) - past + 1))
            wanted.append(logits_of(complete(cache.forward(tier, text, rows))))
            blocks.append(Block(together[i], text[past:], past, rows))
            places.append((i, past, len(text)))
        if not blocks:
            continue
        before = _contents(engine, together)
        order = rng.permutation(len(blocks))
        found = engine.forward(tier, [blocks[i] for i in order])
        for i, rows_found in zip(order, found, strict=True):
            assert_close(logits_of(rows_found), wanted[i])
        after = _contents(engine, together)
        for i, past, end in places:
            after[i][..., past:end, :] = before[i][..., past:end, :]
        for kept, was in zip(after, before, strict=True):
            assert np.array_equal(kept, was), "a pass wrote where it was not fed"
    for i, cache in enumerate(alone):
        length = cache.lengths[FULL]
        if length:
            held = [_contents(engine, [kv])[0][..., :length, :] for kv in (together[i], cache._buffers)]
            assert_close(*held)


def _contents(engine: Any, buffers: list[Any]) -> list[np.ndarray]:
    layers = range(engine.kv["num_layers"])
    return [np.stack([kv.keys_values(layer) for layer in layers]) for kv in buffers]


def test_any_sequence_of_batched_passes_equals_the_sequences_alone(tiny_pipelines: dict[str, WatchedPipeline]) -> None:
    check_batches_against_single_sequences(tiny_pipelines["mask"])


def test_a_sequence_at_the_end_of_its_buffers_shares_a_pass_with_a_prompt(tiny_bundle: Path) -> None:
    engine, _ = open_engines(load_bundle(tiny_bundle), threads=1)
    long, prompt = np.random.default_rng(1).integers(0, 256, (2, MAX_SEQ_LEN)).tolist()
    prompt = prompt[:100]
    near, new = engine.new_buffers(), engine.new_buffers()
    near.forward(FULL, long[:-1], 0, 1)
    blocks = [Block(near, long[-1:], MAX_SEQ_LEN - 1, 1), Block(new, prompt, 0, 1)]
    found = [logits_of(rows) for rows in engine.forward(FULL, blocks)]
    for rows, text in zip(found, (long, prompt), strict=True):
        assert_close(rows, logits_of(engine.new_buffers().forward(FULL, text, 0, 1)))


def test_a_copied_prefix_is_bit_for_bit_what_it_was_copied_from(tiny_bundle: Path) -> None:
    pipeline = Pipeline.load(tiny_bundle, threads=1, retained_slots=0)
    system, options = "the quick brown fox jumps over the lazy dog " * 2, {"raw": True, "mode": "plain", "logprobs": 0}
    first = pipeline.stream(system + "once", **options, max_new_tokens=4)
    next(first)
    second = pipeline.stream(system + "more", **options, max_new_tokens=4)
    next(second)
    (source, target) = pipeline.model._slots._running
    read = len(pipeline.encode(system, raw=True)) - 1
    held = _contents(pipeline.verifier, [source.buffers, target.buffers])
    assert np.array_equal(held[0][..., :read, :], held[1][..., :read, :])
    assert held[0][..., :read, :].any()
    assert not np.array_equal(held[0], held[1])
    second.close()
    assert first.close() is None


# -- deterministic -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, tiny_masks: tuple[Path, Path]) -> Any:
    """Deterministic engines by precision of the weights."""
    from via_sd.export import export_bundle

    engines = {}
    for precision in ("fp32", "int8", "int4"):
        out = tmp_path_factory.mktemp(precision) / "bundle"
        export_bundle(tiny_checkpoint, out, masks=[tiny_masks[0]], precision=precision, max_seq_len=MAX_SEQ_LEN)
        engines[precision], _ = open_engines(load_bundle(out), threads=1, deterministic=True)
    return engines


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_a_deterministic_engine_gives_the_same_bits_however_a_text_is_cut_and_whatever_runs_beside_it(
    precision: str, quantised: dict[str, OrtEngine]
) -> None:
    engine = quantised[precision]
    rng = np.random.default_rng(7)
    text, other = rng.integers(0, 256, (2, 60)).tolist()
    wanted = logits_of(engine.new_buffers().forward(FULL, text, 0, len(text)))
    held = None
    for cut in range(12):
        kv, beside = engine.new_buffers(), [engine.new_buffers() for _ in range(cut % 4)]
        past, rows = 0, []
        while past < len(text):
            count = 1 if cut == 0 else min(int(rng.integers(1, 6)), len(text) - past)
            blocks = [Block(kv, text[past : past + count], past, count)]
            blocks += [Block(buffers, other[past : past + 1 + i], past, 1) for i, buffers in enumerate(beside)]
            rows.append(logits_of(engine.forward(FULL, blocks)[0]))
            past += count
        assert np.array_equal(np.concatenate(rows), wanted)
        contents = _contents(engine, [kv])[0][..., : len(text), :]
        assert held is None or np.array_equal(contents, held)
        held = contents


# -- memory ------------------------------------------------------------------------------------------------------------


def test_slots_are_used_again_from_the_lowest_and_run_out(tiny_bundle: Path) -> None:
    engine, _ = open_engines(load_bundle(tiny_bundle), threads=1, slots=3)
    first, second, third = (engine.new_buffers() for _ in range(3))
    assert [kv.slot for kv in (first, second, third)] == [0, 1, 2]  # type: ignore[attr-defined]
    with pytest.raises(BusyError, match="all 3 KV slots of the engine are taken"):
        engine.new_buffers()
    second.forward(FULL, [1, 2, 3], 0, 1)
    del second
    again = engine.new_buffers()
    assert again.slot == 1  # type: ignore[attr-defined]
    assert not any(again.keys_values(layer).any() for layer in range(6)), "a released slot still holds KV"


def test_a_failed_sequence_gives_its_slot_back_though_its_error_is_kept(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traceback of an error refers to the frames that refer to the KV buffers."""
    pipeline = Pipeline.load(tiny_bundle, threads=1, max_sequences=1, retained_slots=0)

    def fails(tier: str, blocks: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(pipeline.model.verifier, "forward", fails)
    kept = []
    for _ in range(3):
        with pytest.raises(RuntimeError, match="out of memory") as raised:
            pipeline.generate("abc", mode="plain")
        kept.append(raised)
    monkeypatch.undo()
    assert pipeline.generate("abc", mode="plain", max_new_tokens=3, ignore_eos=True).token_ids
    del kept


def _resident_kib() -> int:
    status = Path("/proc/self/smaps_rollup")
    if not status.exists():
        pytest.skip("memory is read from /proc")
    return int(next(line for line in status.read_text().splitlines() if line.startswith("Rss:")).split()[1])


def test_kv_memory_is_taken_as_a_sequence_grows_and_given_back_with_its_slot() -> None:
    from via_sd.runtime.engines.kv_storage import KVStorage

    kv = {"num_layers": 4, "parts": ["key", "value"], "num_heads": 4, "head_dim": 64, "dtype": "float32"}
    before = _resident_kib()
    storage = KVStorage(kv, slots=64, positions=65536)
    assert _resident_kib() - before < 8192, "32 GiB of addresses took memory"
    slots = [storage.take() for _ in range(3)]
    for parts in storage.layers:
        for array in parts:
            array[slots[1], :, :1024] = 1.0
    mib = 4 * 2 * 4 * 1024 * 64 * 4 / 1024
    assert 0.9 * mib < _resident_kib() - before < mib + 8192
    storage.copy(slots[1], slots[2], 512)
    assert storage.layers[3][1][slots[2], :, :512].all()
    assert not storage.layers[3][1][slots[2], :, 512:600].any()
    storage.release(slots[1])
    storage.release(slots[2])
    assert _resident_kib() - before < 8192
