"""Slots, queue, time-outs and clients that go away, on the real server.

`narrow` runs one request and lets one wait; `hasty` runs one, lets requests wait for 0.2 s, and gives them 1 s.
A request for thousands of tokens takes the only slot for as long as a test needs it; that it was cut short, and did not
just end in time, shows in the figures: none has ended at its length.
"""

from __future__ import annotations

import json
import socket

import pytest

from tests.support.parrot import ANSWER, LONG, PROMPT
from tests.support.triton_client import PATIENCE, GrpcClient, Reply, eventually, metric, post
from tests.support.tritonserver import TritonServer

pytestmark = pytest.mark.server


def begin(client: GrpcClient, **values: object) -> Reply:
    """Sends a long request and waits until it has a slot, which its first text shows."""
    client.send(PROMPT, **{**LONG, **values})
    return next(client.receive())


def waiting(server: TritonServer, model: str) -> float:
    return metric(server.metrics_url, "via_sd_waiting_requests", model=model)


def active(server: TritonServer, model: str) -> float:
    return metric(server.metrics_url, "via_sd_active_requests", model=model)


def ended(server: TritonServer, model: str, result: str) -> float:
    return metric(server.metrics_url, "via_sd_requests_total", model=model, result=result)


def test_the_queue_has_a_limit_with_an_error_of_its_own(server: TritonServer) -> None:
    with (
        GrpcClient(server.grpc_url, "narrow") as running,
        GrpcClient(server.grpc_url, "narrow") as next_in_line,
        GrpcClient(server.grpc_url, "narrow") as turned_away,
    ):
        begin(running)
        next_in_line.send(PROMPT)
        assert eventually(lambda: waiting(server, "narrow") == 1)
        reply = turned_away.ask(PROMPT)
        assert reply.error is not None
        assert "the queue's limit" in reply.error
        running.cancel()
        *_, reply = next_in_line.receive()
        assert reply.text == ANSWER


def test_a_client_that_cancels_over_grpc_frees_its_slot(server: TritonServer) -> None:
    before = ended(server, "narrow", "cancelled")
    with GrpcClient(server.grpc_url, "narrow") as first, GrpcClient(server.grpc_url, "narrow") as second:
        begin(first)
        second.send(PROMPT)
        assert eventually(lambda: waiting(server, "narrow") == 1)
        first.cancel()
        *_, reply = second.receive()
        assert reply.text == ANSWER
    assert eventually(lambda: ended(server, "narrow", "cancelled") == before + 1)
    assert ended(server, "narrow", "length") == 0


def http_request(server: TritonServer, model: str, endpoint: str, stream: bool) -> socket.socket:
    """The open connection of a long request that has a slot."""
    body = json.dumps({"text_input": PROMPT, **LONG, "stream": stream}).encode()
    head = f"POST /v2/models/{model}/{endpoint} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.http_port), timeout=PATIENCE)
    connection.sendall(head.encode() + body)
    assert eventually(lambda: active(server, model) == 1)
    return connection


def test_a_client_that_drops_its_http_stream_frees_its_slot(server: TritonServer) -> None:
    before = ended(server, "narrow", "cancelled")
    http_request(server, "narrow", "generate_stream", stream=True).close()
    with GrpcClient(server.grpc_url, "narrow") as client:
        assert client.ask(PROMPT).text == ANSWER
    assert eventually(lambda: ended(server, "narrow", "cancelled") == before + 1)
    assert ended(server, "narrow", "length") == 0


def test_an_answer_in_one_piece_that_its_http_client_gave_up_on_ends_by_time_out(server: TritonServer) -> None:
    """Triton looks at the connection when it writes to it, which for such a request is at its end."""
    before = ended(server, "hasty", "timeout")
    http_request(server, "hasty", "generate", stream=False).close()
    assert eventually(lambda: ended(server, "hasty", "timeout") == before + 1)
    with GrpcClient(server.grpc_url, "hasty") as client:
        assert client.ask(PROMPT, max_tokens=8).text == ANSWER[:5]


def test_a_client_that_cancels_while_it_waits_leaves_the_queue(server: TritonServer) -> None:
    with (
        GrpcClient(server.grpc_url, "narrow") as running,
        GrpcClient(server.grpc_url, "narrow") as leaving,
        GrpcClient(server.grpc_url, "narrow") as staying,
    ):
        begin(running)
        leaving.send(PROMPT)
        assert eventually(lambda: waiting(server, "narrow") == 1)
        leaving.cancel()
        assert eventually(lambda: waiting(server, "narrow") == 0)
        staying.send(PROMPT)
        assert eventually(lambda: waiting(server, "narrow") == 1)
        running.cancel()
        *_, reply = staying.receive()
        assert reply.text == ANSWER


def test_a_request_that_waits_too_long_gets_an_error_of_its_own(server: TritonServer) -> None:
    before = ended(server, "hasty", "queue_timeout")
    with GrpcClient(server.grpc_url, "hasty") as running, GrpcClient(server.grpc_url, "hasty") as waits:
        running.send(PROMPT, **LONG)
        # Several, so that one of them waits for as long as it may, whenever the one that runs is cut short.
        for number in range(8):
            waits.send(PROMPT, request_id=str(number), **LONG)
        errors = []
        while len(errors) < 8:
            _, error, final = waits.take()
            if final:
                errors.append(error.message())
    assert any("no slot came free within" in error for error in errors), errors
    assert eventually(lambda: ended(server, "hasty", "queue_timeout") > before)


def test_a_request_that_takes_too_long_ends_with_an_error_after_the_text_it_got(server: TritonServer) -> None:
    with GrpcClient(server.grpc_url, "hasty") as client:
        reply = begin(client)
        *_, reply = client.receive(reply)
        assert reply.error == "the request was not done within 1 s, its time-out"
        assert reply.text
        assert reply.text[: len(ANSWER)] == ANSWER[: len(reply.text)]
        assert client.ask(PROMPT, max_tokens=8).text == ANSWER[:5]


def test_a_request_may_bring_its_own_time_out(server: TritonServer, client: GrpcClient) -> None:
    client.send(PROMPT, **LONG, timeout=500_000)
    *_, reply = client.receive()
    assert reply.error == "the request was not done within 0.5 s, its time-out"
    body = {"text_input": PROMPT, **LONG, "stream": False}
    status, text = post(server.http_url, "generate", {**body, "timeout": 500_000})
    assert (status, json.loads(text)["error"]) == (400, "the request was not done within 0.5 s, its time-out")
    status, text = post(server.http_url, "generate", {**body, "timeout": "soon"})
    assert (status, json.loads(text)["error"]) == (400, "timeout is 'soon', wanted microseconds, more than 0")
    assert eventually(lambda: active(server, client.model) == 0)


def test_four_requests_at_once_each_get_their_share(client: GrpcClient) -> None:
    """Counted in text, not in seconds: from when all have begun until the first ends, each gets as much."""
    names = [str(number) for number in range(4)]
    for name in names:
        client.send(PROMPT, request_id=name, **{**LONG, "max_tokens": 3000, "mode": "plain"})
    received = dict.fromkeys(names, 0)
    begun: dict[str, int] | None = None
    ends: list[dict[str, int]] = []
    while len(ends) < len(names):
        result, error, final = client.take()
        assert error is None
        received[result.get_response().id] += len(result.as_numpy("text_output")[0])
        if begun is None and all(received.values()):
            begun = dict(received)
        if final:
            ends.append(dict(received))
    first, last = ends[0], ends[-1]
    assert begun is not None
    shares = {name: first[name] - begun[name] for name in names}
    assert min(shares.values()) > 0.5 * max(shares.values()), (begun, first)
    assert len(set(last.values())) == 1, last
