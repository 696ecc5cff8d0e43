"""Requests that cannot be served: one clear error each, and nothing else stops."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.triton.client import GrpcClient, events, eventually, metric, post
from tests.triton.parrot import ANSWER, MAX_SEQ_LEN, PROMPT
from via_sd.tools.tritonserver import TritonServer

MALFORMED: dict[str, tuple[str | bytes, dict[str, Any], str]] = {
    "no prompt": ("", {}, "text_input is empty"),
    "not UTF-8": (b"\xff\xfe", {}, "text_input is not UTF-8"),
    "no tokens": (PROMPT, {"max_tokens": 0}, "max_tokens is 0, wanted 1 or more"),
    "negative temperature": (PROMPT, {"temperature": -1.0}, "temperature is -1.0"),
    "not a number": (PROMPT, {"top_p": float("nan")}, "top_p is nan"),
    "top_p over 1": (PROMPT, {"top_p": 1.5}, "top_p is 1.5"),
    "unknown mode": (PROMPT, {"mode": "warp"}, "mode 'warp' is not known"),
    "penalty that is not supported": (PROMPT, {"presence_penalty": 0.5}, "presence_penalty is 0.5"),
    "prompt longer than the buffers": ("a" * MAX_SEQ_LEN, {}, f"the prompt has {MAX_SEQ_LEN} tokens"),
}


@pytest.mark.parametrize(("prompt", "values", "message"), MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_malformed_request_gets_one_final_error_and_the_stream_goes_on(
    prompt: str | bytes, values: dict[str, Any], message: str, stream: bool, client: GrpcClient
) -> None:
    reply = client.ask(prompt, stream=stream, **values)
    assert reply.error is not None
    assert message in reply.error
    assert reply.chunks == []
    assert client.ask(PROMPT).text == ANSWER


def test_a_malformed_request_over_http_gets_status_400_and_the_same_message(server: TritonServer) -> None:
    status, body = post(server.http_url, "generate", {"text_input": PROMPT, "max_tokens": 0})
    assert (status, json.loads(body)["error"]) == (400, "max_tokens is 0, wanted 1 or more")
    status, body = post(server.http_url, "generate_stream", {"text_input": PROMPT, "max_tokens": 0, "stream": True})
    assert (status, events(body)) == (400, [{"error": "max_tokens is 0, wanted 1 or more"}])


def test_penalties_of_zero_are_taken_because_the_openai_front_end_always_sends_them(client: GrpcClient) -> None:
    assert client.ask(PROMPT, presence_penalty=0.0, frequency_penalty=0.0).text == ANSWER


def test_malformed_requests_are_counted_apart(server: TritonServer, client: GrpcClient) -> None:
    def invalid() -> float:
        return metric(server.metrics_url, "via_sd_requests_total", result="invalid")

    before = invalid()
    for _ in range(3):
        assert client.ask("").error
    assert eventually(lambda: invalid() == before + 3)


def test_the_tensors_of_tritons_openai_front_end_are_understood(client: GrpcClient) -> None:
    """What it sends for any model that is not vLLM's, and the outputs from which it makes its usage figures."""
    reply = client.ask(
        PROMPT,
        stream=False,
        max_tokens=40,
        stop_words=["again"],
        top_p=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        seed=1,
        temperature=0.0,
        exclude_input_in_output=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    assert (reply.error, len(reply.chunks), reply.finals) == (None, 1, 1)
    assert reply.outputs["num_input_tokens"] == len(PROMPT)
    assert reply.outputs["num_output_tokens"] == 40
