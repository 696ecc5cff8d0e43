"""A drafter is taken when it means the same tokens by the same ids, whatever padding stands behind them."""

from __future__ import annotations

from pathlib import Path

import pytest

from via_sd.errors import ExportError
from via_sd.export.writer.vocabulary import check_vocabularies

REAL = 259  # tokens of the tests' tokenizer


@pytest.fixture
def ours(tmp_path, new_tokenizer) -> Path:
    new_tokenizer().save_pretrained(tmp_path / "ours")
    return tmp_path / "ours"


def test_the_same_tokens_are_accepted_whatever_the_padding(ours, tmp_path, new_tokenizer):
    new_tokenizer().save_pretrained(tmp_path / "theirs")
    for verifier_rows, drafter_rows in ((REAL, REAL), (320, REAL), (REAL, 320), (384, 320)):
        found = check_vocabularies(
            ours, tmp_path / "theirs", {"vocab_size": verifier_rows}, {"vocab_size": drafter_rows}
        )
        assert found == REAL


def test_a_token_only_the_drafter_has_is_named(ours, tmp_path, new_tokenizer):
    new_tokenizer(extra=["<tool>"]).save_pretrained(tmp_path / "theirs")
    with pytest.raises(ExportError, match=r"1 entries: token '<tool>' is 259 for the drafter and missing for the ver"):
        check_vocabularies(ours, tmp_path / "theirs", {"vocab_size": 320}, {"vocab_size": 320})


def test_a_token_only_the_verifier_has_is_named(ours, tmp_path, new_tokenizer):
    new_tokenizer(extra=["<tool>"]).save_pretrained(tmp_path / "more")
    with pytest.raises(ExportError, match=r"token '<tool>' is missing for the drafter and 259 for the verifier"):
        check_vocabularies(tmp_path / "more", ours, {"vocab_size": 320}, {"vocab_size": 320})


def test_the_same_strings_under_other_ids_are_refused(ours, tmp_path, new_tokenizer):
    new_tokenizer(extra=["<a>", "<b>"]).save_pretrained(tmp_path / "ab")
    new_tokenizer(extra=["<b>", "<a>"]).save_pretrained(tmp_path / "ba")
    with pytest.raises(ExportError, match=r"4 entries: token '<a>' is 260 for the drafter and 259 for the verifier"):
        check_vocabularies(tmp_path / "ab", tmp_path / "ba", {"vocab_size": 320}, {"vocab_size": 320})


def test_fewer_logits_than_tokens_are_refused(ours, tmp_path, new_tokenizer):
    new_tokenizer().save_pretrained(tmp_path / "theirs")
    with pytest.raises(ExportError, match="the drafter has 258 logits for 259 tokens"):
        check_vocabularies(ours, tmp_path / "theirs", {"vocab_size": 320}, {"vocab_size": 258})
    with pytest.raises(ExportError, match="the verifier has 258 logits for 259 tokens"):
        check_vocabularies(ours, tmp_path / "theirs", {"vocab_size": 258}, {"vocab_size": 320})
