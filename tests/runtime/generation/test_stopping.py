"""Where a text ends, and that nothing behind that point leaks: end tokens, stop strings, length, cancellation."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.pipelines import AdversarialDrafter, WatchedPipeline, table_pipeline
from tests.support.table_engine import TableEngine, digest_of
from via_sd.contract.generation_options import for_mode
from via_sd.runtime import Completion
from via_sd.runtime.generation.text import Detokenizer, TextStream

SAMPLES = "Hello, wörld! naïve 🙂🙃 日本語のテキスト 👩‍👩‍👧 Ωmega\n\nUser: stop here </s> ### the end \ufffd."
TEXTS = st.text(st.sampled_from(sorted(set(SAMPLES))), min_size=1, max_size=40)
MODES = ("plain", "speculative", "cascade", "routed")


#: The character that stands for each byte in a byte-level vocabulary: itself where it shows, else one from 256 on.
_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
SYMBOLS = {byte: chr(byte) for byte in _SHOWN} | {byte: chr(256 + n) for n, byte in enumerate(_HIDDEN)}


def byte_tokenizer(chunks: Sequence[bytes]) -> tuple[Tokenizer, list[int]]:
    """A byte-level tokenizer with a token for each distinct chunk of bytes, and the ids of the chunks."""
    pieces = ["".join(SYMBOLS[byte] for byte in chunk) for chunk in chunks]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*SYMBOLS.values(), *pieces]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return tokenizer, [vocabulary[piece] for piece in pieces]


@st.composite
def split_texts(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """A text and a split of its bytes into tokens, characters included."""
    text = draw(TEXTS)
    data = text.encode()
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=len(data))))
    edges = [0, *cuts, len(data)]
    return text, [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


@st.composite
def stops_of(draw: st.DrawFn, text: str) -> list[str]:
    """Stop strings: some that occur, some that nearly do."""
    stops = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text) - 1))
        piece = text[start : start + draw(st.integers(1, 6))]
        stops.append(piece + draw(st.sampled_from(("", "", "\x00"))))
    return stops


def cut_at(text: str, stops: Sequence[str]) -> tuple[str, int | None]:
    """`text` up to the stop string that is complete first, and where that one ends (None: there is none)."""
    found = [(at + len(s), at) for s in stops if s and (at := text.find(s)) >= 0]
    if not found:
        return text, None
    end, start = min(found)
    return text[:start], end


@given(data=st.data(), split=split_texts())
@settings(max_examples=500, derandomize=True, deadline=None)
def test_text_ends_before_the_first_stop_string_however_it_is_split(
    data: st.DataObject, split: tuple[str, list[bytes]]
) -> None:
    text, chunks = split
    stops = data.draw(stops_of(text))
    tokenizer, ids = byte_tokenizer(chunks)
    wanted, end = cut_at(text, stops)
    stream, shown = TextStream(Detokenizer(tokenizer), stops), ""
    for count, token in enumerate(ids, 1):
        going_on = stream.push(token)
        shown += stream.take()
        assert wanted.startswith(shown), "shown text is certain: it is never taken back"
        if not going_on:
            complete = len(b"".join(chunks[:count])) >= len(text[:end].encode())
            assert end is not None
            assert complete
            break
        so_far = b"".join(chunks[:count]).decode(errors="replace")
        if not so_far.endswith("\ufffd"):
            assert cut_at(so_far, stops)[1] is None, "a stop string was complete and went unnoticed"
            held_back = len(so_far) - len(shown)
            assert held_back < max((len(s) for s in stops), default=1), "more is held back than may be a stop string"
    shown += stream.finish()
    assert shown == stream.text == wanted
    assert stream.stopped == (end is not None)


@given(ids=st.lists(st.integers(0, 255), max_size=30))
@settings(max_examples=500, derandomize=True, deadline=None)
def test_bytes_that_are_no_characters_are_shown_as_such_and_lose_nothing_else(ids: list[int]) -> None:
    tokenizer, _ = byte_tokenizer([])
    stream = TextStream(Detokenizer(tokenizer))
    shown = ""
    for token in ids:
        stream.push(token)
        shown += stream.take()
        assert not shown.endswith("\ufffd"), "half a character waits for its other bytes"
    assert shown + stream.finish() == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 270), max_size=30))
@settings(max_examples=500, derandomize=True, deadline=None)
def test_a_decoder_that_changes_its_mind_about_bytes_does_not_break_a_stream(ids: list[int]) -> None:
    # Byte fallback, as in Llama 2, Mistral and Gemma: an invalid byte turns its whole run of bytes into U+FFFD.
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ("▁the", "▁", "é", "ab", "日本", "▁▁", "<s>", "</s>", "<unk>"):
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    stream, shown = TextStream(Detokenizer(tokenizer)), ""
    for token in ids:
        stream.push(token)
        shown += stream.take()
    shown += stream.finish()
    whole = tokenizer.decode(ids)
    assert stream.text == shown
    assert whole == shown or "\ufffd" in whole
    assert [c for c in whole if c in "日本 the"] == [c for c in shown if c in "日本 the"] or "\ufffd" in whole


# -- whole generations ---------------------------------------------------------------------------------------------


class Script:
    """Tiers that want to write given tokens after the prompt: full exactly, slim and deep with slips of their own."""

    def __init__(self, vocab_size: int, prompt: Sequence[int], script: Sequence[int], slips: float = 0.2) -> None:
        self.vocab_size = vocab_size
        self._wanted: dict[int, int] = {}
        self._rng_key = len(script)
        self._slips = slips
        tokens = list(prompt)
        for token in script:
            self._wanted[digest_of(tokens)] = token
            tokens.append(token)

    def __call__(self, tier: str, recent: tuple[int, ...], digest: int) -> np.ndarray:
        token = self._wanted.get(digest, 0)
        rng = np.random.default_rng([digest, len(tier)])
        if tier != "full" and rng.random() < self._slips:
            token = int(rng.integers(self.vocab_size))
        row = np.zeros(self.vocab_size, np.float32)
        row[token] = 12.0 if tier == "full" else rng.choice([12.0, 5.0])
        return row


@st.composite
def scenes(draw: st.DrawFn) -> dict[str, Any]:
    text, chunks = draw(split_texts())
    return {
        "text": text,
        "chunks": chunks,
        "stop": draw(stops_of(text)),
        "limit": draw(st.one_of(st.integers(1, len(chunks) + 1), st.just(len(chunks)))),
        "eos_at": draw(st.one_of(st.none(), st.integers(0, len(chunks)))),
        "two_eos": draw(st.booleans()),
        "ignore_eos": draw(st.booleans()),
        "gamma": draw(st.integers(1, 9)),
        "seed": draw(st.integers(0, 99)),
    }


@pytest.mark.parametrize("kind", ["mask", "adversarial"])
@pytest.mark.parametrize("mode", MODES)
def test_a_text_ends_where_it_should_in_every_mode(
    mode: str, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("pipelines")

    @given(scenes())
    @settings(max_examples=120, derandomize=True, deadline=None)
    def check(scene: dict[str, Any]) -> None:
        tokenizer, ids = byte_tokenizer(scene["chunks"])
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|a|>", "<|b|>")])
        size = tokenizer.get_vocab_size()
        eos = [size - 2, size - 1]
        script = list(ids)
        if scene["eos_at"] is not None:
            script.insert(scene["eos_at"], eos[scene["two_eos"]])
        script.append(eos[0])
        prompt = tokenizer.encode("Go on: ").ids
        # `routed` follows slim where slim slips; exact modes do not.
        logits = Script(size, prompt, script, slips=0.0 if mode == "routed" else 0.2)
        pipeline = table_pipeline(
            TableEngine(logits, size, 256), directory, draft_with="mask", tokenizer=tokenizer, eos=eos
        )
        if kind == "adversarial":
            right = _follow(script, len(prompt))
            pipeline.replacement = lambda *_: AdversarialDrafter(size, right, scene["seed"])
        _check_scene(pipeline, scene, mode, script, eos)

    check()


def _follow(script: Sequence[int], prompt: int) -> Any:
    return lambda sequence: script[len(sequence) - prompt] if len(sequence) - prompt < len(script) else None


def _check_scene(
    pipeline: WatchedPipeline, scene: dict[str, Any], mode: str, script: list[int], eos: list[int]
) -> None:
    stream = pipeline.stream(
        "Go on: ", raw=True, max_new_tokens=scene["limit"], stop=scene["stop"],
        ignore_eos=scene["ignore_eos"], gamma=scene["gamma"], **for_mode({"mode": mode, "router": "paper"}),
    )  # fmt: skip
    chunks = list(stream)
    found: Completion = stream.completion
    assert "".join(chunk.text for chunk in chunks) == found.text
    assert [t for chunk in chunks for t in chunk.token_ids] == found.token_ids
    assert [t for chunk in chunks for t in chunk.tiers] == found.tiers
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [found.finish_reason]
    count = len(found.token_ids)
    assert found.stats.emitted_tokens == len(found.tiers) == count
    assume(scene["ignore_eos"] is False or count <= len(script))
    assert found.token_ids == script[:count]
    # Brute force: the text of the first n tokens, for the smallest n that ends it.
    tokenizer, ends = pipeline.tokenizer, frozenset() if scene["ignore_eos"] else frozenset(eos)
    for n in range(1, count + 1):
        _, end = cut_at(tokenizer.decode(script[:n]), scene["stop"])
        whole = not tokenizer.decode(script[:n]).endswith("\ufffd")
        if script[n - 1] in ends or (end is not None and whole):
            assert (n, found.finish_reason) == (count, "stop"), f"it ended at token {n}"
        elif n == scene["limit"]:
            assert (n, found.finish_reason) == (count, "length" if end is None else "stop")
        else:
            assert n < count, "nothing ended it here"
    assert found.text == cut_at(tokenizer.decode(found.token_ids), scene["stop"])[0]


def test_the_bytes_of_a_byte_level_vocabulary_are_what_the_library_says() -> None:
    assert set(SYMBOLS.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert (
        Tokenizer.from_str(byte_tokenizer([])[0].to_str()).decode(list(byte_tokenizer([])[0].encode("日🙂é").ids))
        == "日🙂é"
    )


def test_a_stop_string_completed_by_the_last_token_allowed_is_a_stop(tmp_path: Path) -> None:
    tokenizer, ids = byte_tokenizer([b"one", b" END", b" more"])
    logits = Script(tokenizer.get_vocab_size(), tokenizer.encode("x").ids, ids)
    pipeline = table_pipeline(TableEngine(logits, logits.vocab_size), tmp_path, tokenizer=tokenizer)
    for mode in ("plain", "speculative"):
        found = pipeline.generate("x", mode=mode, raw=True, max_new_tokens=2, stop="END")
        assert (found.finish_reason, found.text, len(found.token_ids)) == ("stop", "one ", 2)
        found = pipeline.generate("x", mode=mode, raw=True, max_new_tokens=1, stop="END")
        assert (found.finish_reason, found.text) == ("length", "one")


def test_a_stop_string_inside_a_token_that_ends_within_a_character_does_not_leak(tmp_path: Path) -> None:
    tokenizer, ids = byte_tokenizer([b"one", b" END\xe6", b"\x97\xa5 more"])
    logits = Script(tokenizer.get_vocab_size(), tokenizer.encode("x").ids, ids)
    pipeline = table_pipeline(TableEngine(logits, logits.vocab_size), tmp_path, tokenizer=tokenizer)
    found = pipeline.generate("x", mode="plain", raw=True, max_new_tokens=2, stop="END")
    assert (found.finish_reason, found.text) == ("stop", "one ")


def test_held_back_text_comes_out_when_no_stop_string_follows(tmp_path: Path) -> None:
    tokenizer, ids = byte_tokenizer([b"a", b"#", b"#", b"b", b"#", b"#"])
    logits = Script(tokenizer.get_vocab_size(), tokenizer.encode("x").ids, ids)
    pipeline = table_pipeline(TableEngine(logits, logits.vocab_size), tmp_path, tokenizer=tokenizer)
    chunks = list(pipeline.stream("x", mode="plain", raw=True, max_new_tokens=6, stop="###"))
    assert [chunk.text for chunk in chunks] == ["a", "", "", "##b", "", "##"]


def test_cancelling_from_another_thread_ends_the_text_between_rounds(tmp_path: Path) -> None:
    tokenizer, _ = byte_tokenizer([])
    reached, cancel = threading.Event(), threading.Event()
    logits = Script(tokenizer.get_vocab_size(), tokenizer.encode("x").ids, [])

    def watch(buffers: Any) -> bool:
        # The engine itself waits for the other thread, so that the cancellation falls into the middle of a round.
        if len(buffers.calls) == 5:
            reached.set()
            assert cancel.wait(10)
        return False

    for mode in MODES:
        reached.clear(), cancel.clear()
        engine = TableEngine(logits, logits.vocab_size, fails=watch)
        pipeline = table_pipeline(engine, tmp_path, tokenizer=tokenizer)
        other = threading.Thread(target=lambda: (reached.wait(10), cancel.set()))
        other.start()
        stream = pipeline.stream("x", mode=mode, raw=True, max_new_tokens=100, cancel=cancel, gamma=2)
        chunks = list(stream)
        other.join()
        found = stream.completion
        assert found.finish_reason == chunks[-1].finish_reason == "cancelled"
        assert [t for chunk in chunks for t in chunk.token_ids] == found.token_ids
        assert found.stats.emitted_tokens == len(found.token_ids) < 30
        assert found.text == tokenizer.decode(found.token_ids)


def test_a_request_cancelled_before_it_starts_emits_one_round(tmp_path: Path) -> None:
    tokenizer, _ = byte_tokenizer([])
    logits = Script(tokenizer.get_vocab_size(), tokenizer.encode("x").ids, [])
    pipeline = table_pipeline(TableEngine(logits, logits.vocab_size), tmp_path, tokenizer=tokenizer)
    cancel = threading.Event()
    cancel.set()
    found = pipeline.generate("x", mode="speculative", raw=True, cancel=cancel)
    assert (found.finish_reason, len(found.token_ids), found.stats.rounds) == ("cancelled", 1, 1)
