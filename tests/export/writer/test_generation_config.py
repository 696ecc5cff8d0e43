"""What `export` keeps of a model's generation_config.json, and what it says of the rest."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from via_sd.errors import ExportError
from via_sd.export.writer.generation_config import read_generation_config


def read(directory: Path, settings: Any) -> tuple[dict[str, Any], str]:
    """What is kept of `settings`, and the warnings."""
    (directory / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return read_generation_config(directory), " ".join(str(each.message) for each in caught)


def test_rules_are_kept_and_sampling_where_the_model_samples(tmp_path: Path) -> None:
    rules = {"suppress_tokens": [1, 2], "bad_words_ids": [[3, 4]], "no_repeat_ngram_size": 3, "min_new_tokens": 2}
    sampling = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0}
    kept, said = read(tmp_path, {**rules, **sampling, "do_sample": True, "eos_token_id": 5, "repetition_penalty": 1.0})
    assert kept == {**rules, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert "recommends temperature 0.6, top_k 20, top_p 0.95; generation is greedy unless a request asks" in said
    kept, said = read(tmp_path, {**rules, **sampling, "repetition_penalty": 1.1})
    assert kept == {**rules, "repetition_penalty": 1.1}


def test_what_is_not_followed_is_named(tmp_path: Path) -> None:
    kept, said = read(tmp_path, {"num_beams": 4, "typical_p": 1.0, "forced_bos_token_id": 7})
    assert (kept, said) == (
        {},
        "generation_config.json sets num_beams, forced_bos_token_id, which this runtime does not follow",
    )


def test_a_model_without_the_file_has_no_rules(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == {}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([], "wanted a JSON object"),
        ({"suppress_tokens": 5}, "suppress_tokens is 5; repair it, or leave it out"),
        ({"bad_words_ids": [[]]}, "bad_words_ids is"),
        ({"temperature": True}, "temperature is True"),
        ({"top_k": -1}, "top_k is -1"),
    ],
)
def test_a_value_of_another_type_is_refused(settings: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=says.replace("[", "\\[")):
        read(tmp_path, settings)
