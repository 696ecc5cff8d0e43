"""A request's tensors become the runtime's arguments; what a model's configuration says stands in for the rest."""

from __future__ import annotations

import numpy as np
import pytest

from via_sd.runtime.triton.request import Defaults, InvalidRequest, Request, parse_request


def parse(defaults: Defaults | None = None, **values: str) -> Request:
    tensors = {"text_input": "a", **values}
    arrays = {name: np.array([[value.encode()]], object) for name, value in tensors.items()}
    return parse_request(arrays, {}, defaults or Defaults())


def test_defaults_of_the_router_are_for_requests_whose_mode_has_one() -> None:
    defaults = Defaults(options={"mode": "routed", "router": "paper", "max_divergence": 0.1})
    assert parse(defaults).options["router"] == "paper"
    assert parse(defaults, mode="routed").options["router"] == "paper"
    exact = parse(defaults, mode="plain").options
    assert (exact["mode"], exact["max_divergence"]) == ("plain", 0.1)
    assert "router" not in exact


def test_empty_texts_count_as_left_out() -> None:
    defaults = Defaults(options={"mode": "cascade"})
    found = parse(defaults, mode="", bad_words="", logit_bias="", stop_words="").options
    assert found["mode"] == "cascade"
    assert not {"bad_words", "logit_bias"} & found.keys()
    assert found["stop"] == []


def test_biases_of_texts_add_up_by_token() -> None:
    arrays = {
        "text_input": np.array([["a"]], object),
        "embedding_bias_words": np.array([["ab", b"b"]], object),
        "embedding_bias_weights": np.array([[1.5, -1.0]], np.float32),
    }
    found = parse_request(arrays, {}, Defaults(tokens_of=lambda text: [ord(letter) for letter in text]))
    assert found.options["logit_bias"] == {97: 1.5, 98: 0.5}
    with pytest.raises(InvalidRequest, match="logit_bias and embedding_bias_words exclude each other"):
        parse_request({**arrays, "logit_bias": np.array([["{}"]], object)}, {}, Defaults(tokens_of=lambda text: [1]))
