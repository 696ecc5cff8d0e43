"""A server that dies, models that are loaded and unloaded, bundles that cannot be loaded."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.triton.test_soak import resident
from tests.support.parrot import ANSWER, LONG, PROMPT
from tests.support.triton_client import MODEL, GrpcClient, eventually, metric
from tests.support.tritonserver import TritonServer, TritonServerError
from via_sd.export.triton import ServingOptions, write_repository

pytestmark = pytest.mark.server


def test_a_client_sees_an_error_when_the_server_dies_and_the_next_one_is_served(repository: Path) -> None:
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
    assert not list(Path("/dev/shm").glob(f"{server._prefix}*"))


STARTER = """
import sys
from pathlib import Path

from tests.support.tritonserver import TritonServer

server = TritonServer(Path(sys.argv[1]), explicit=True)
server.start()
print(server.http_port, flush=True)
sys.stdin.read()
"""


def test_a_server_ends_with_the_program_that_started_it(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(repository)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # for what a program that is killed cannot clear away
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as starter:
        assert starter.stdout is not None
        address = ("127.0.0.1", int(starter.stdout.readline()))
        socket.create_connection(address).close()
        starter.kill()

    def gone() -> bool:
        try:
            socket.create_connection(address).close()
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:  # it is on its way
            return False
        return False

    assert eventually(gone)


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
            texts.append(result.as_numpy("text_output")[0].decode())
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


def test_a_configuration_that_was_edited_wrongly_says_so_when_the_model_loads(bundle: Path, tmp_path: Path) -> None:
    edits = {
        "backend": ("onnxruntime", "warp", "backend 'warp' is not known"),
        "default": ("0.5", "5", "max_divergence is 5.0, wanted 0 to 1"),
        "router": ("paper", "calibrated", "router calibrated needs a calibration"),
        "number": ("4", "four", "parameter slots is 'four', wanted a whole number"),
    }
    options = ServingOptions(
        threads=1, backend="onnxruntime", defaults={"mode": "routed", "router": "paper", "max_divergence": "0.5"}
    )
    for name, (old, new, _) in edits.items():
        config = write_repository(bundle, tmp_path, name=name, options=options, copy=False) / "config.pbtxt"
        text = config.read_text(encoding="utf-8")
        assert text.count(f'string_value: "{old}"') == 1
        config.write_text(text.replace(f'string_value: "{old}"', f'string_value: "{new}"'), encoding="utf-8")
    with TritonServer(tmp_path, explicit=True) as server, GrpcClient(server.grpc_url) as client:
        for name, (_, _, message) in edits.items():
            with pytest.raises(Exception, match=f"load failed for model '{name}'") as error:
                client.client.load_model(name)
            assert message in str(error.value)


def test_the_model_serves_without_figures_where_the_server_keeps_none(bundle: Path, tmp_path: Path) -> None:
    write_repository(bundle, tmp_path, options=ServingOptions(threads=1), copy=False)
    with TritonServer(tmp_path, metrics=False) as server, GrpcClient(server.grpc_url) as client:
        assert client.ask(PROMPT).text == ANSWER
