"""A server that dies, models that are loaded and unloaded, bundles that cannot be loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.triton.client import MODEL, GrpcClient, eventually, metric
from tests.triton.parrot import ANSWER, PROMPT
from tests.triton.test_soak import resident
from via_sd.export.triton import ServingOptions, write_repository
from via_sd.tools.tritonserver import TritonServer, TritonServerError

LONG = {"stream": True, "ignore_eos": True, "max_tokens": 4000}


def test_a_client_sees_an_error_when_the_server_dies_and_the_next_one_is_served(repository: Path) -> None:
    regions = set(Path("/dev/shm").iterdir())
    server = TritonServer(repository, explicit=True, load=(MODEL,))
    server.start()
    try:
        with GrpcClient(server.grpc_url) as client:
            client.send(PROMPT, **LONG)
            replies = client.receive()
            next(replies)
            server.kill()
            *_, reply = replies
            assert reply.error is not None
        server.start()
        with GrpcClient(server.grpc_url) as client:
            assert client.ask(PROMPT).text == ANSWER
    finally:
        server.stop()
    assert set(Path("/dev/shm").iterdir()) <= regions


def test_a_model_can_be_loaded_and_unloaded_without_leaking(server: TritonServer) -> None:
    with GrpcClient(server.grpc_url) as client:
        admin = client.client
        sizes = []
        for _ in range(4):
            admin.unload_model("hasty")
            while admin.is_model_ready("hasty"):
                pass
            admin.load_model("hasty")
            with GrpcClient(server.grpc_url, "hasty") as other:
                assert other.ask(PROMPT).text == ANSWER
            sizes.append(resident(server))
    assert all(set(size) == set(sizes[0]) for size in sizes), "a model's process was left behind"
    assert sizes[-1]["server"] < 1.05 * sizes[0]["server"]


def test_a_model_that_is_unloaded_finishes_what_it_began(server: TritonServer) -> None:
    with GrpcClient(server.grpc_url, "narrow") as client:
        client.send(PROMPT, **{**LONG, "max_tokens": 1500})
        replies = client.receive()
        next(replies)
        client.client.unload_model("narrow")
        *_, reply = replies
        assert reply.error is None
        assert reply.outputs["finish_reason"] == "length"
        client.client.load_model("narrow")


def test_two_instances_serve_and_count_apart(bundle: Path, tmp_path: Path) -> None:
    options = ServingOptions(threads=1, instances=2)
    write_repository(bundle, tmp_path, options=options, copy=False)
    with TritonServer(tmp_path) as server, GrpcClient(server.grpc_url) as client:
        for name in map(str, range(8)):
            client.send(PROMPT, request_id=name)
        texts = []
        while len(texts) < 8:
            result, error, _ = client.take()
            assert error is None
            texts.append(result.as_numpy("text_output")[0, 0].decode())
        assert set(texts) == {ANSWER}

        def served(number: int) -> float:
            instance = f"via_sd_0_{number}"
            return metric(server.metrics_url, "via_sd_requests_total", instance=instance, result="stop")

        assert eventually(lambda: served(0) + served(1) == 8)
        assert min(served(0), served(1)) > 0


def test_a_damaged_bundle_is_named_when_the_model_does_not_load(bundle: Path, tmp_path: Path) -> None:
    folder = write_repository(bundle, tmp_path)
    weights = folder / "1" / "bundle" / "verifier" / "weights.data"
    weights.write_bytes(b"\0" + weights.read_bytes()[1:])
    with pytest.raises(TritonServerError, match=r"weights\.data is changed"):
        TritonServer(tmp_path).start()


def test_the_model_serves_without_figures_where_the_server_keeps_none(bundle: Path, tmp_path: Path) -> None:
    write_repository(bundle, tmp_path, options=ServingOptions(threads=1), copy=False)
    with TritonServer(tmp_path, metrics=False) as server, GrpcClient(server.grpc_url) as client:
        assert client.ask(PROMPT).text == ANSWER
