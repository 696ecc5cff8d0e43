"""Two hundred requests, sixteen at a time, a tenth of them cancelled and a twentieth malformed."""

from __future__ import annotations

import os
import queue
import random
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.parrot import ANSWER, LONG, PROMPT
from tests.support.triton_client import GrpcClient, eventually, metric
from tests.support.tritonserver import TritonServer
from via_sd.runtime import Pipeline

pytestmark = pytest.mark.server

REQUESTS, CLIENTS = 200, 16
CANCELLED, MALFORMED = REQUESTS // 10, REQUESTS // 20


@dataclass(frozen=True)
class Case:
    """One request and what has to become of it; no text stands for an error, and a cancelled one has neither."""

    prompt: str
    values: dict[str, Any]
    expected: str | None
    cancelled: bool = False


def cases(pipeline: Pipeline) -> list[Case]:
    """Requests of mixed lengths, modes and ways of sampling, in an order that a fixed seed shuffles."""
    rng = random.Random(5)
    made = []
    for number in range(REQUESTS - CANCELLED - MALFORMED):
        prompt = PROMPT + ANSWER[: rng.randrange(80)]
        options: dict[str, Any] = {
            "mode": rng.choice(["plain", "speculative", "cascade", "routed"]),
            "max_tokens": rng.choice([1, 5, 40, 150, 400]),
            "ignore_eos": rng.random() < 0.5,
        }
        if number % 3 == 0:
            options |= {"temperature": 0.9, "seed": number}
        text = library(pipeline, prompt, options)
        made.append(Case(prompt, {**options, "stream": rng.random() < 0.5}, text))
    made += [Case(PROMPT, {**LONG, "mode": "plain"}, None, cancelled=True)] * CANCELLED
    broken = [{"temperature": -1.0}, {"mode": "none"}, {"max_tokens": 0}]
    made += [Case(PROMPT, broken[number % len(broken)], None) for number in range(MALFORMED)]
    rng.shuffle(made)
    return made


def library(pipeline: Pipeline, prompt: str, options: dict[str, Any]) -> str:
    renamed = {"max_new_tokens" if name == "max_tokens" else name: value for name, value in options.items()}
    return pipeline.generate(prompt, raw=True, **renamed).text


def serve(server: TritonServer, requests: list[Case]) -> list[str]:
    """Sends `requests` from as many threads as there are clients; a line for everything that went wrong."""
    todo: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in requests:
        todo.put(case)
    wrong: list[str] = []

    def work() -> None:
        with GrpcClient(server.grpc_url) as client:
            while True:
                try:
                    case = todo.get_nowait()
                except queue.Empty:
                    return
                if problem := check(client, case):
                    wrong.append(f"{case}: {problem}")

    threads = [threading.Thread(target=work) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def check(client: GrpcClient, case: Case) -> str | None:
    """What is wrong with how one request was answered."""
    client.send(case.prompt, **case.values)
    replies = client.receive()
    if case.cancelled:
        next(replies)
        client.cancel()
        return None
    *_, reply = replies
    if reply.finals != 1 or not client.messages.empty():
        return f"{reply.finals} final responses, {client.messages.qsize()} after them"
    if case.expected is None:
        return None if reply.error else f"no error but {reply.text!r}"
    if reply.error or reply.text != case.expected:
        return f"{reply.error or reply.text!r} where the library says {case.expected!r}"
    return None


def resident(server: TritonServer) -> dict[str, int]:
    """Resident memory in KiB of the server and of each of its models' processes."""
    found = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            parent = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
            command = (process / "cmdline").read_bytes().split(b"\0")
            status = (process / "status").read_text()
        except OSError:  # it has ended since
            continue
        if "VmRSS:" not in status:
            continue
        size = int(status.split("VmRSS:")[1].split()[0])
        if int(process.name) == server.pid:
            found["server"] = size
        elif parent == server.pid and os.fsencode("triton_python_backend_stub") in command[0]:
            found[command[8].decode()] = size
    return found


def ended(server: TritonServer) -> float:
    """Requests that have ended, however they did."""
    return metric(server.metrics_url, "via_sd_requests_total", model="via_sd")


def test_every_answer_is_right_and_the_server_is_left_as_it_was(server: TritonServer, pipeline: Pipeline) -> None:
    requests = cases(pipeline)
    # Once to let allocators and KV buffers take what they take; what is measured is what a second time adds.
    assert serve(server, requests) == []
    before, counted = resident(server), ended(server)
    assert serve(server, requests) == []
    after = resident(server)

    assert server.ready()
    assert eventually(lambda: ended(server) == counted + REQUESTS), "a request did not end just once"
    grown = {name: after[name] / before[name] for name in before}
    assert max(grown.values()) < 1.05, grown
    for gauge in ("via_sd_active_requests", "via_sd_waiting_requests"):
        assert eventually(lambda name=gauge: metric(server.metrics_url, name) == 0)  # type: ignore[misc]
    assert metric(server.metrics_url, "via_sd_requests_total", model="via_sd", result="internal") == 0
    passes, sequences, tokens = (
        metric(server.metrics_url, f"via_sd_{name}_total", model="via_sd")
        for name in ("passes", "pass_sequences", "pass_tokens")
    )
    assert 1.5 * passes < sequences < tokens, "requests do not share forward passes"
    with GrpcClient(server.grpc_url) as client:
        assert client.ask(PROMPT).text == ANSWER
