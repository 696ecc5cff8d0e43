"""Text over gRPC and HTTP, whole and streamed, is the library's own text."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.parrot import ANSWER, PROMPT
from tests.support.triton_client import GrpcClient, events, post
from tests.support.tritonserver import TritonServer
from via_sd.runtime import Pipeline

pytestmark = pytest.mark.server

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "plain": {"mode": "plain"},
    "cascade": {"mode": "cascade"},
    "routed": {"mode": "routed"},
    "sampled": {"temperature": 0.8, "seed": 7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "max_tokens": 90},
    "penalised": {"repetition_penalty": 1.3, "max_tokens": 60},
    "seed beyond 32 bits": {"temperature": 1.5, "seed": 2**63 + 11, "max_tokens": 30},
    "a few tokens": {"max_tokens": 10},
    "stop word after emoji": {"stop_words": ["世"]},
    "stop word over many tokens": {"stop_words": ["nowhere", "again: 你好"]},
    "stop word inside a drafted block": {"stop_words": ["界! A"]},
    "past the end": {"ignore_eos": True, "max_tokens": 200},
}


def library(pipeline: Pipeline, values: dict[str, Any]) -> str:
    renamed = {"max_tokens": "max_new_tokens", "stop_words": "stop"}
    return pipeline.generate(
        PROMPT, raw=True, **{renamed.get(name, name): value for name, value in values.items()}
    ).text


@pytest.mark.parametrize("values", REQUESTS.values(), ids=REQUESTS.keys())
def test_every_way_to_ask_gives_the_text_of_the_library(
    values: dict[str, Any], server: TritonServer, client: GrpcClient, pipeline: Pipeline
) -> None:
    expected = library(pipeline, values)
    streamed = client.ask(PROMPT, stream=True, **values)
    whole = client.ask(PROMPT, **values)
    body = {"text_input": PROMPT, **values}
    status, once = post(server.http_url, "generate", body)
    stream_status, stream = post(server.http_url, "generate_stream", {**body, "stream": True})

    assert streamed.error is whole.error is None
    assert streamed.text == expected
    assert whole.chunks == [expected]
    assert (status, json.loads(once)["text_output"]) == (200, expected)
    assert (stream_status, "".join(event["text_output"] for event in events(stream))) == (200, expected)


def test_the_text_is_the_passage_with_its_emoji_and_ideographs(client: GrpcClient) -> None:
    reply = client.ask(PROMPT, stream=True)
    assert reply.text == ANSWER
    assert len(reply.chunks) > 2
    assert not any("\N{REPLACEMENT CHARACTER}" in chunk for chunk in reply.chunks)


def test_a_stop_word_ends_the_text_before_it_and_nothing_of_it_is_streamed(client: GrpcClient) -> None:
    reply = client.ask(PROMPT, stream=True, stop_words=["again: 你好"])
    assert reply.text == ANSWER[: ANSWER.index("again")]
    assert reply.outputs["finish_reason"] == "stop"


def test_only_the_last_response_of_a_stream_is_final_and_carries_the_statistics(client: GrpcClient) -> None:
    client.send(PROMPT, stream=True)
    *before, last = [(reply.finals, set(reply.outputs)) for reply in client.receive()]
    assert len(before) > 2
    assert all(seen == (0, set()) for seen in before)
    assert last[0] == 1
    assert {"finish_reason", "acceptance_rate", "total_draft_tokens", "total_accepted_draft_tokens"} <= last[1]


def test_statistics_are_those_of_the_library(client: GrpcClient, pipeline: Pipeline) -> None:
    stats = pipeline.generate(PROMPT, raw=True, mode="cascade").stats
    outputs = client.ask(PROMPT, mode="cascade").outputs
    assert outputs["mode_used"] == "cascade"
    assert outputs["total_draft_tokens"] == stats.drafted_tokens > 0
    assert outputs["total_accepted_draft_tokens"] == stats.accepted_tokens > 0
    assert outputs["acceptance_rate"] == pytest.approx(stats.accepted_tokens / stats.drafted_tokens)
    counts = {tier: outputs[f"{tier}_tier_tokens"] for tier in ("draft", "slim", "full")}
    assert counts == stats.tier_counts
    assert sum(counts.values()) == stats.emitted_tokens


def test_token_counts_come_when_asked_for_and_those_of_chunks_add_up(client: GrpcClient, pipeline: Pipeline) -> None:
    done = pipeline.generate(PROMPT, raw=True)
    assert "num_output_tokens" not in client.ask(PROMPT).outputs
    asked = {"return_num_input_tokens": True, "return_num_output_tokens": True}
    whole = client.ask(PROMPT, **asked).outputs
    assert (whole["num_input_tokens"], whole["num_output_tokens"]) == (done.prompt_tokens, len(done.token_ids))
    client.send(PROMPT, stream=True, **asked)
    assert sum(reply.outputs["num_output_tokens"] for reply in client.receive()) == len(done.token_ids)


def test_the_prompt_leads_a_text_in_one_piece_when_it_is_not_excluded_and_never_a_stream(client: GrpcClient) -> None:
    assert client.ask(PROMPT, exclude_input_in_output=False).text == PROMPT + ANSWER
    assert client.ask(PROMPT, stream=True, exclude_input_in_output=False).text == ANSWER


def test_the_chat_template_applies_per_request_or_by_default(server: TritonServer, pipeline: Pipeline) -> None:
    told = pipeline.generate(" 🦊", mode="plain").text
    plain = pipeline.generate(" 🦊", mode="plain", raw=True).text
    assert told != plain
    values: dict[str, Any] = {"mode": "plain", "max_tokens": 256}
    with GrpcClient(server.grpc_url) as default, GrpcClient(server.grpc_url, "told") as templated:
        assert default.ask(" 🦊", **values).text == plain
        assert default.ask(" 🦊", apply_chat_template=True, **values).text == told
        assert templated.ask(" 🦊", **values).text == told
        assert templated.ask(" 🦊", apply_chat_template=False, **values).text == plain


def test_several_requests_on_one_stream_are_answered_side_by_side(client: GrpcClient) -> None:
    texts: dict[str, str] = {"a": "", "b": "", "c": ""}
    for name in texts:
        client.send(PROMPT, request_id=name, stream=True)
    finals: list[str] = []
    while len(finals) < len(texts):
        result, error, final = client.take()
        assert error is None
        name = result.get_response().id
        texts[name] += result.as_numpy("text_output")[0].decode()
        if final:
            finals.append(name)
    assert sorted(finals) == ["a", "b", "c"]
    assert set(texts.values()) == {ANSWER}


def test_the_end_of_the_text_as_first_token_gives_one_final_response_without_text(client: GrpcClient) -> None:
    for stream in (False, True):
        reply = client.ask(PROMPT + ANSWER, stream=stream)
        assert (reply.chunks, reply.finals, reply.error) == ([""], 1, None)
        assert reply.outputs["finish_reason"] == "stop"


def test_the_client_of_the_examples_prints_the_text(server: TritonServer, pipeline: Pipeline) -> None:
    command = [sys.executable, ROOT / "examples" / "triton_client.py", server.grpc_url, "The sea is"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    wanted = pipeline.generate("The sea is", max_new_tokens=48)
    assert (done.returncode, done.stdout) == (0, f"{wanted.text}\nended by {wanted.finish_reason}\n"), done.stderr
