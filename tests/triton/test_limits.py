"""Slots, queue, time-outs and clients that go away, on the real server.

`narrow` runs one request and lets one wait; `hasty` runs one, lets requests wait for 0.2 s, and gives them 0.6 s.
A request for thousands of tokens takes the only slot for as long as a test needs it.
"""

from __future__ import annotations

import json
import socket
import time

from tests.triton.client import PATIENCE, GrpcClient, Reply, eventually, metric
from tests.triton.parrot import ANSWER, PROMPT
from via_sd.tools.tritonserver import TritonServer

#: More steps than any test here waits for.
LONG = {"stream": True, "ignore_eos": True, "max_tokens": 4000}


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
        next_in_line.send(PROMPT, apply_chat_template=False)
        assert eventually(lambda: waiting(server, "narrow") == 1)
        reply = turned_away.ask(PROMPT)
        assert reply.error is not None
        assert "the queue's limit" in reply.error
        running.cancel()
        *_, reply = next_in_line.receive()
        assert reply.text == ANSWER


def test_a_client_that_cancels_over_grpc_frees_its_slot_at_once(server: TritonServer) -> None:
    before = ended(server, "narrow", "cancelled")
    with GrpcClient(server.grpc_url, "narrow") as first, GrpcClient(server.grpc_url, "narrow") as second:
        begin(first)
        second.send(PROMPT, apply_chat_template=False)
        assert eventually(lambda: waiting(server, "narrow") == 1)
        cancelled_at = time.monotonic()
        first.cancel()
        *_, reply = second.receive()
        # The long request had seconds to go.
        assert time.monotonic() - cancelled_at < 0.5
        assert reply.text == ANSWER
    assert eventually(lambda: ended(server, "narrow", "cancelled") == before + 1)


def test_a_client_that_drops_its_http_connection_frees_its_slot_at_once(server: TritonServer) -> None:
    before = ended(server, "narrow", "cancelled")
    body = json.dumps({"text_input": PROMPT, **LONG}).encode()
    head = f"POST /v2/models/narrow/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=PATIENCE) as connection:
        connection.sendall(head.encode() + body)
        received = b""
        while b"text_output" not in received:
            received += connection.recv(65536)
    gone_at = time.monotonic()
    with GrpcClient(server.grpc_url, "narrow") as client:
        assert client.ask(PROMPT, apply_chat_template=False).text == ANSWER
    assert time.monotonic() - gone_at < 0.5
    assert eventually(lambda: ended(server, "narrow", "cancelled") == before + 1)


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
        staying.send(PROMPT, apply_chat_template=False)
        assert eventually(lambda: waiting(server, "narrow") == 1)
        running.cancel()
        *_, reply = staying.receive()
        assert reply.text == ANSWER


def test_a_request_that_waits_too_long_gets_an_error_of_its_own(server: TritonServer) -> None:
    with GrpcClient(server.grpc_url, "hasty") as running, GrpcClient(server.grpc_url, "hasty") as waits:
        begin(running)
        reply = waits.ask(PROMPT)
        assert reply.error is not None
        assert "no slot came free within 0." in reply.error
    assert eventually(lambda: ended(server, "hasty", "queue_timeout") >= 1)


def test_a_request_that_takes_too_long_ends_with_an_error_after_the_text_it_got(server: TritonServer) -> None:
    with GrpcClient(server.grpc_url, "hasty") as client:
        reply = begin(client)
        *_, reply = client.receive(reply)
        assert reply.error == "the request was not done within 0.6 s, its time-out"
        assert reply.text.startswith(ANSWER.rstrip())
        assert client.ask(PROMPT).text == ANSWER


def test_a_request_may_bring_its_own_time_out(server: TritonServer, client: GrpcClient) -> None:
    client.send(PROMPT, **LONG, timeout=150_000)
    *_, reply = client.receive()
    assert reply.error == "the request was not done within 0.15 s, its time-out"
    assert reply.text != ""
    assert eventually(lambda: active(server, client.model) == 0)


def test_four_long_requests_at_once_each_get_their_share(server: TritonServer) -> None:
    values = {**LONG, "max_tokens": 600, "mode": "plain"}
    clients = [GrpcClient(server.grpc_url) for _ in range(4)]
    begun = time.monotonic()
    clients[0].ask(PROMPT, **values)
    alone = time.monotonic() - begun
    begun = time.monotonic()
    for client in clients:
        client.send(PROMPT, **values)
    took = []
    for client in clients:
        *_, reply = client.receive()
        assert reply.error is None
        took.append(time.monotonic() - begun)
        client.close()
    assert max(took) < 2 * len(clients) * alone
    # Side by side, not one after the other: the first to end has nearly all of the others' time behind it.
    assert min(took) > 0.5 * max(took)
