"""Requests that cannot be served: one clear error each, and nothing else stops."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.support.parrot import ANSWER, MAX_SEQ_LEN, PROMPT
from tests.support.triton_client import GrpcClient, events, eventually, metric, post
from tests.support.tritonserver import TritonServer
from via_sd.runtime import Pipeline

pytestmark = pytest.mark.server

MALFORMED: dict[str, tuple[str | bytes, dict[str, Any], str]] = {
    "no prompt": ("", {}, "text_input is empty"),
    "not UTF-8": (b"\xff\xfe", {}, "text_input is not UTF-8"),
    "no tokens": (PROMPT, {"max_tokens": 0}, "max_tokens is 0, wanted 1 or more"),
    "negative temperature": (PROMPT, {"temperature": -1.0}, "temperature is -1.0"),
    "not a number": (PROMPT, {"top_p": float("nan")}, "top_p is nan"),
    "top_p over 1": (PROMPT, {"top_p": 1.5}, "top_p is 1.5"),
    "unknown mode": (PROMPT, {"mode": "warp"}, "mode 'warp' is not known"),
    "penalty out of range": (PROMPT, {"presence_penalty": 2.5}, "presence_penalty is 2.5, wanted -2 to 2"),
    "several beams": (PROMPT, {"beam_width": 4}, "beam_width is 4, and only 1 is supported"),
    "a guide of a kind that is not known": (
        PROMPT,
        {"guided_decoding_guide_type": "tag", "guided_decoding_guide": "x"},
        "guided_decoding_guide_type is 'tag', wanted one of json, json_schema, regex, ebnf_grammar",
    ),
    "another end": (
        PROMPT,
        {"end_id": 5},
        "end_id is 5, and only a token that ends this model's text is supported: 257",
    ),
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


def test_a_field_that_is_no_input_is_refused_and_not_ignored(server: TritonServer) -> None:
    """Triton itself makes a parameter of it: a misspelt limit would go unnoticed."""
    status, body = post(server.http_url, "generate", {"text_input": PROMPT, "max_new_tokens": 5, "top_n": 1})
    message = "no input of this model is called max_new_tokens, top_n: its config says which there are"
    assert (status, json.loads(body)["error"]) == (400, message)


def test_what_clients_of_tensorrt_llm_always_send_is_taken_where_it_changes_nothing(
    server: TritonServer, client: GrpcClient
) -> None:
    reply = client.ask(
        PROMPT,
        beam_width=1,
        num_return_sequences=1,
        min_tokens=1,
        length_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        bad_words=[""],
        stop_words=[""],
        pad_id=0,
        end_id=257,
    )
    assert reply.text == ANSWER
    body = {"text_input": PROMPT, "max_tokens": 200, "bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 257}
    body |= {"id": "1", "model": "via_sd"}
    status, text = post(server.http_url, "generate", body)
    assert (status, json.loads(text)["text_output"]) == (200, ANSWER)


def test_text_comes_in_the_shape_that_clients_of_tensorrt_llm_decode(client: GrpcClient) -> None:
    client.send(PROMPT)
    result, error, _ = client.take()
    assert error is None
    assert result.as_numpy("text_output").shape == (1,)
    assert result.as_numpy("text_output")[0].decode() == ANSWER


def test_grammars_and_penalties_are_those_of_the_library(client: GrpcClient, pipeline: Pipeline) -> None:
    pytest.importorskip("llguidance", reason="needs the grammar extra")
    schema = '{"enum": ["river", "sea"]}'
    reply = client.ask(PROMPT, guided_decoding_guide_type="json_schema", guided_decoding_guide=schema)
    assert reply.text == pipeline.generate(PROMPT, raw=True, json_schema=schema).text
    assert json.loads(reply.text) in ("river", "sea")
    options: dict[str, Any] = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "bad_words": ["fox"]}
    found = pipeline.generate(PROMPT, raw=True, max_new_tokens=30, no_repeat_ngram_size=2, **options)
    assert client.ask(PROMPT, max_tokens=30, no_repeat_ngram_size=2, **options).text == found.text


def test_top_p_of_0_is_off_as_connectors_send_it(client: GrpcClient) -> None:
    assert client.ask(PROMPT, top_p=0.0, top_k=1, temperature=1.0, length_penalty=1.0, beam_width=1).text == ANSWER


def test_a_request_without_a_prompt_is_told_so(server: TritonServer) -> None:
    status, body = post(server.http_url, "generate", {"max_tokens": 3})
    assert status == 400
    assert "text_input" in json.loads(body)["error"]


def test_the_seed_may_come_under_its_older_name(client: GrpcClient) -> None:
    sampled = {"temperature": 1.0, "max_tokens": 30}
    text = client.ask(PROMPT, seed=11, **sampled).text
    assert client.ask(PROMPT, random_seed=11, **sampled).text == text
    assert client.ask(PROMPT, random_seed=12, **sampled).text != text


def test_log_probabilities_come_with_the_last_response_when_asked_for(client: GrpcClient, pipeline: Pipeline) -> None:
    done = pipeline.generate(PROMPT, raw=True, max_new_tokens=20, logprobs=0)
    assert done.logprobs is not None
    wanted = [token.logprob for token in done.logprobs]
    assert "output_log_probs" not in client.ask(PROMPT, max_tokens=20).outputs
    for stream in (False, True):
        client.send(PROMPT, max_tokens=20, return_log_probs=True, stream=stream)
        *_, reply = client.receive()
        assert reply.outputs["output_log_probs"].tolist() == [pytest.approx(wanted, abs=1e-6)]
        assert reply.outputs["cum_log_probs"] == pytest.approx(sum(wanted), abs=1e-5)


def test_what_a_request_leaves_out_comes_from_the_configuration(server: TritonServer, pipeline: Pipeline) -> None:
    with GrpcClient(server.grpc_url, "told") as client:
        reply = client.ask(PROMPT, apply_chat_template=False)
        assert reply.text == pipeline.generate(PROMPT, raw=True, max_new_tokens=7).text
        assert (reply.outputs["finish_reason"], reply.outputs["mode_used"]) == ("length", "cascade")
        reply = client.ask(PROMPT, apply_chat_template=False, max_tokens=9, mode="plain")
        assert reply.text == pipeline.generate(PROMPT, raw=True, max_new_tokens=9).text
        assert reply.outputs["mode_used"] == "plain"


def test_malformed_requests_are_counted_apart(server: TritonServer, client: GrpcClient) -> None:
    def invalid() -> float:
        return metric(server.metrics_url, "via_sd_requests_total", result="invalid")

    before = invalid()
    for _ in range(3):
        assert client.ask("").error
    assert eventually(lambda: invalid() == before + 3)


def test_the_tensors_of_tritons_openai_front_end_are_understood(client: GrpcClient) -> None:
    """What it sends for any model that is not vLLM's, and the 32-bit outputs from which it makes its usage figures."""
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
    assert (reply.outputs["num_input_tokens"], reply.outputs["num_output_tokens"]) == (len(PROMPT), 40)
    assert reply.outputs["num_input_tokens"].dtype == reply.outputs["num_output_tokens"].dtype == np.int32
