"""The layout with a model per tier, decoding over calls to them on the real server.

The server here has no ONNX Runtime backend. Its place is taken by a Python model that runs the same graph with the same
`config.pbtxt`, so names, types, shapes and the model over the tiers are what they would be; only the runner differs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.parrot import ANSWER, PROMPT
from tests.support.triton_client import GrpcClient
from tests.support.tritonserver import TritonServer
from via_sd.export.triton import ServingOptions, write_tiers
from via_sd.runtime import Pipeline

pytestmark = pytest.mark.server

RUNNER = """
from pathlib import Path

import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        graph = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        self.session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        feeds = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        names = list(request.requested_output_names())
        outputs = self.session.run(names, feeds)
        tensors = [pb_utils.Tensor(name, array) for name, array in zip(names, outputs)]
        return pb_utils.InferenceResponse(tensors)
"""


def test_the_model_over_the_tiers_says_what_the_library_says(bundle: Path, pipeline: Pipeline, tmp_path: Path) -> None:
    write_tiers(bundle, tmp_path, options=ServingOptions(threads=1), copy=False)
    for tier in ("full", "slim"):
        config = tmp_path / tier / "config.pbtxt"
        text = config.read_text(encoding="utf-8")
        assert 'backend: "onnxruntime"' in text
        config.write_text(text.replace('backend: "onnxruntime"', 'backend: "python"'), encoding="utf-8")
        (tmp_path / tier / "1" / "model.py").write_text(RUNNER, encoding="utf-8")
    with TritonServer(tmp_path) as server, GrpcClient(server.grpc_url) as client:
        for mode in ("plain", "speculative", "cascade"):
            reply = client.ask(PROMPT, mode=mode, stream=True)
            assert (reply.error, reply.text) == (None, ANSWER)
        sampled = {"temperature": 0.9, "seed": 3, "mode": "cascade"}
        reply = client.ask(PROMPT, max_tokens=40, **sampled)
        assert reply.text == pipeline.generate(PROMPT, raw=True, max_new_tokens=40, **sampled).text
        routed = pipeline.generate(PROMPT, raw=True, max_new_tokens=40, mode="routed")
        reply = client.ask(PROMPT, max_tokens=40, mode="routed")
        assert reply.text == routed.text
        assert reply.outputs["slim_tier_tokens"] == routed.stats.tier_counts["slim"] > 0


def test_a_slim_tier_in_int8_is_served_as_the_library_runs_it(server: TritonServer, precise_bundle: Path) -> None:
    library = Pipeline.load(precise_bundle, threads=1)
    with GrpcClient(server.grpc_url, "precise") as client:
        for mode in ("plain", "cascade", "routed"):
            wanted = library.generate(PROMPT, raw=True, max_new_tokens=40, mode=mode)
            reply = client.ask(PROMPT, max_tokens=40, mode=mode)
            assert (reply.error, reply.text) == (None, wanted.text)
            assert reply.outputs["slim_tier_tokens"] == wanted.stats.tier_counts["slim"]
        assert wanted.stats.tier_counts["slim"] > 0
