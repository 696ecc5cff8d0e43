"""Clients that others wrote for TensorRT-LLM's models, on the real server.

Those that PyPI has are run: LangChain's connector and `perf_analyzer`. NVIDIA's `end_to_end_grpc_client.py` and the
OpenAI front end are not there; their requests are sent tensor by tensor, and their answers read as they read them.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import ROOT
from tests.support.foreign_clients import run_perf_analyzer, run_with_connector
from tests.support.parrot import ANSWER, PROMPT
from tests.support.triton_client import PATIENCE, GrpcClient, post, tensors
from tests.support.tritonserver import TritonServer
from via_sd.contract.served_model import INPUTS
from via_sd.runtime import Pipeline

pytestmark = pytest.mark.server

Arrays = dict[str, np.ndarray]


def infer_inputs(arrays: Mapping[str, np.ndarray]) -> list[Any]:
    """Input tensors whose types are those of the arrays, as clients make them that do not ask the model."""
    import tritonclient.grpc as grpc
    from tritonclient.utils import np_to_triton_dtype

    inputs = []
    for name, array in arrays.items():
        tensor = grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def ask(url: str, arrays: Arrays, model: str = "via_sd", outputs: tuple[str, ...] = ("text_output",)) -> list[Any]:
    """What NVIDIA's client does: one request on a stream that it closes at once, then results and errors."""
    import tritonclient.grpc as grpc

    got: queue.Queue[Any] = queue.Queue()
    with grpc.InferenceServerClient(url) as client:
        client.start_stream(callback=lambda result, error: got.put(error or result))
        wanted = [grpc.InferRequestedOutput(name) for name in outputs] or None
        client.async_stream_infer(model, infer_inputs(arrays), outputs=wanted, request_id="")
        client.stop_stream()
    return [got.get() for _ in range(got.qsize())]


def nvidia(prompt: str, length: int, *, stream: bool, temperature: float = 0.0, **more: Any) -> Arrays:
    """The tensors of NVIDIA's client: these always, `more` by its flags."""
    return {
        "text_input": np.array([[prompt]]).astype(object),
        "max_tokens": np.array([[length]], np.int32),
        "stream": np.array([[stream]]),
        "beam_width": np.array([[1]], np.int32),
        "temperature": np.array([[temperature]], np.float32),
        "exclude_input_in_output": np.array([[False]]),
        **{name: np.array([value if isinstance(value, list) else [value]]) for name, value in more.items()},
    }


@pytest.mark.parametrize("stream", [False, True])
def test_nvidias_client_gets_the_answer_behind_the_prompt_and_streams_it_without(
    stream: bool, server: TritonServer
) -> None:
    found = ask(server.grpc_url, nvidia(PROMPT, 200, stream=stream))
    text = "".join(result.as_numpy("text_output")[0].decode() for result in found)
    assert text == (ANSWER if stream else PROMPT + ANSWER)
    assert len(found) > 1 or not stream


def test_nvidias_clients_flags_are_understood(server: TritonServer, pipeline: Pipeline) -> None:
    flags: Arrays = nvidia(
        PROMPT, 40, stream=False,
        repetition_penalty=np.float32(1.1), presence_penalty=np.float32(0.2), frequency_penalty=np.float32(0.1),
        num_return_sequences=np.int32(1), return_log_probs=True, end_id=np.int32(257), pad_id=np.int32(257),
    )  # fmt: skip
    flags["stop_words"], flags["bad_words"] = (np.array([[word]], object) for word in ("again", "fox"))
    outputs = ("text_output", "cum_log_probs", "output_log_probs")
    (result,) = ask(server.grpc_url, flags, outputs=outputs)
    wanted = pipeline.generate(
        PROMPT, raw=True, max_new_tokens=40, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1,
        stop=["again"], bad_words=["fox"],
    )  # fmt: skip
    assert result.as_numpy("text_output")[0].decode() == PROMPT + wanted.text
    assert result.as_numpy("output_log_probs").shape == (1, 1, len(wanted.token_ids))
    assert result.as_numpy("cum_log_probs").shape == (1, 1)


@pytest.mark.parametrize("flag", ["beam_width", "num_return_sequences"])
def test_more_than_one_answer_is_refused_to_nvidias_client(flag: str, server: TritonServer) -> None:
    arrays = nvidia(PROMPT, 5, stream=False) | {flag: np.array([[2]], np.int32)}
    (error,) = ask(server.grpc_url, arrays)
    assert f"{flag} is 2, and only 1 is supported" in str(error)


def biased(server: TritonServer, **values: np.ndarray) -> Any:
    (found,) = ask(server.grpc_url, nvidia(PROMPT, 12, stream=False) | values)
    return found


def test_biases_by_text_and_by_token_are_those_of_the_library(server: TritonServer, pipeline: Pipeline) -> None:
    token = pipeline.encode("x", raw=True)[0]
    wanted = PROMPT + pipeline.generate(PROMPT, raw=True, max_new_tokens=12, logit_bias={token: 100}).text
    words, weights = np.array([["x"]], object), np.array([[100]], np.float32)
    for given in (
        {"embedding_bias_words": words, "embedding_bias_weights": weights},
        {"logit_bias": np.array([[json.dumps({token: 100})]], object)},
    ):
        assert biased(server, **given).as_numpy("text_output")[0].decode() == wanted
    said = str(biased(server, embedding_bias_words=words))
    assert "embedding_bias_words has 1 texts, and embedding_bias_weights 0: give as many" in said
    said = str(biased(server, logit_bias=np.array([["[1]"]], object)))
    assert "logit_bias is '[1]', wanted a JSON object of numbers by token id" in said


def test_stop_tokens_and_suppressed_tokens_are_those_of_the_library(server: TritonServer, pipeline: Pipeline) -> None:
    stop, fox = pipeline.encode("!", raw=True), pipeline.encode("s", raw=True)
    found = biased(
        server, stop_token_ids=np.array([[*stop, 256]], np.int32), suppress_tokens=np.array([fox], np.int32),
        max_tokens=np.array([[60]], np.int32),
    )  # fmt: skip
    wanted = pipeline.generate(
        PROMPT, raw=True, max_new_tokens=60, stop_token_ids=[*stop, 256], suppress_tokens=fox
    ).text
    assert found.as_numpy("text_output")[0].decode() == PROMPT + wanted
    assert "s" not in wanted
    status, body = post(server.http_url, "generate", {"text_input": PROMPT, "stop_token_ids": stop, "max_tokens": 99})
    assert status == 200
    assert json.loads(body)["text_output"].endswith("!")


def langchain(stream: bool) -> Arrays:
    """The tensors of LangChain's connectors to TensorRT-LLM."""
    return {
        "text_input": np.array([[PROMPT]]).astype(object),
        "max_tokens": np.array([[100]], np.uint32),
        "top_k": np.array([[1]], np.uint32),
        "top_p": np.array([[0]], np.float32),
        "temperature": np.array([[1.0]], np.float32),
        "length_penalty": np.array([[1.0]], np.float32),
        "repetition_penalty": np.array([[1.0]], np.float32),
        "random_seed": np.array([[42]], np.uint64),
        "beam_width": np.array([[1]], np.uint32),
        "stream": np.array([[stream]]),
    }


@pytest.mark.parametrize("stream", [False, True])
def test_langchains_connector_gets_the_text_from_a_model_with_unsigned_counts(
    stream: bool, server: TritonServer, pipeline: Pipeline
) -> None:
    found = ask(server.grpc_url, langchain(stream), "unsigned")
    wanted = pipeline.generate(PROMPT, raw=True, max_new_tokens=100).text
    # It joins the texts of `text_output`, and takes the final flag from the response as JSON.
    texts = ["".join(each.decode() for each in result.as_numpy("text_output")) for result in found]
    assert "".join(texts) == wanted
    last = found[-1].get_response(as_json=True)
    assert last["parameters"]["triton_final_response"]["bool_param"] is True


CONNECTOR = """
import json, sys
from langchain_nvidia_trt.llms import TritonTensorRTLLM

model = TritonTensorRTLLM(server_url=sys.argv[1], model_name="unsigned", tokens=100)
print(json.dumps([model.invoke(sys.argv[2]), list(model.stream(sys.argv[2]))]))
"""


def test_langchains_connector_itself_gets_and_streams_the_text(server: TritonServer, pipeline: Pipeline) -> None:
    said = run_with_connector(CONNECTOR, server.grpc_url, PROMPT, timeout=PATIENCE)
    whole, streamed = json.loads(said.splitlines()[-1])
    assert whole == "".join(streamed) == pipeline.generate(PROMPT, raw=True, max_new_tokens=100).text
    assert len(streamed) > 3


def test_perf_analyzer_measures_streams_and_refuses_http(server: TritonServer, tmp_path: Path) -> None:
    requests = tmp_path / "requests.json"
    requests.write_text(json.dumps({"data": [{"text_input": [PROMPT], "stream": [True], "max_tokens": [16]}]}))
    common = ("-m", "via_sd", "--input-data", str(requests), "--measurement-interval", "500", "-s", "99")
    done = run_perf_analyzer(*common, "-i", "grpc", "-u", server.grpc_url, "--streaming", timeout=PATIENCE)
    assert "infer/sec" in done.stdout, done.stdout + done.stderr
    done = run_perf_analyzer(*common, "-i", "http", "-u", server.http_url, timeout=PATIENCE)
    assert "doesn't support models with decoupled transaction policy" in done.stdout + done.stderr


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"stop_words": np.array([["again", "laughed"]], object)},
        {"temperature": np.array([[1.0]], np.float32), "seed": np.array([[3]], np.uint64)},
        {
            "guided_decoding_guide_type": np.array([["json_schema"]], object),
            "guided_decoding_guide": np.array([['{"enum": ["sea", "river"]}']], object),
        },
    ],
    ids=["completion", "stop", "sampled", "forced tool"],
)
def test_the_openai_front_end_gets_one_text_a_response_and_its_usage(
    asked: Arrays, stream: bool, server: TritonServer, pipeline: Pipeline
) -> None:
    if "guided_decoding_guide" in asked:
        pytest.importorskip("llguidance", reason="needs the grammar extra")
    flags = dict.fromkeys(("return_num_input_tokens", "return_num_output_tokens"), np.array([[True]]))
    arrays = {
        "text_input": np.array([[PROMPT]], object), "stream": np.array([[stream]]),
        "max_tokens": np.array([[100]], np.int32), "top_p": np.array([[1.0]], np.float32),
        "frequency_penalty": np.array([[0.0]], np.float32), "presence_penalty": np.array([[0.0]], np.float32),
        "exclude_input_in_output": np.array([[True]]), **flags, **asked,
    }  # fmt: skip
    found = ask(server.grpc_url, arrays, outputs=())
    texts = [result.as_numpy("text_output") for result in found]
    assert all(text.size == 1 for text in texts), "it reads one string of each response"
    assert (len(found) == 1) is not stream or len(found) <= 2
    seen, made = ([result.as_numpy(name) for result in found] for name in ("num_input_tokens", "num_output_tokens"))
    assert {each.dtype for each in (*seen, *made)} == {np.dtype(np.int32)}
    wanted = pipeline.generate(
        PROMPT, raw=True, max_new_tokens=100, stop=["again", "laughed"] if "stop_words" in asked else [],
        json_schema='{"enum": ["sea", "river"]}' if "guided_decoding_guide" in asked else None,
        temperature=1.0 if "seed" in asked else 0.0, seed=3,
    )  # fmt: skip
    assert "".join(text[0].decode() for text in texts) == wanted.text
    assert seen[0].item() == wanted.prompt_tokens
    assert sum(each.item() for each in made) == len(wanted.token_ids)


@pytest.mark.parametrize(("kind", "name"), [(np.uint32, "UINT32"), (np.int64, "INT64")])
def test_a_count_of_another_type_is_refused_by_triton_with_both_types(
    kind: Any, name: str, server: TritonServer
) -> None:
    arrays = nvidia(PROMPT, 5, stream=False) | {"max_tokens": np.array([[5]], kind)}
    (error,) = ask(server.grpc_url, arrays)
    assert f"inference input 'max_tokens' data-type is '{name}', but model 'via_sd' expects 'INT32'" in str(error)


def test_a_client_may_send_every_input_there_is(server: TritonServer) -> None:
    """With a value that changes nothing, as clients do that go by the metadata."""
    kinds: dict[str, Any] = {"STRING": object, "BOOL": bool, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32}
    given: dict[str, Any] = dict.fromkeys(("beam_width", "num_return_sequences", "repetition_penalty"), 1)
    given |= {"text_input": PROMPT, "max_tokens": 200, "exclude_input_in_output": True, "end_id": 257}
    lists = [spec.name for spec in INPUTS if spec.dims == (-1,) and spec.data_type != "STRING"]
    arrays = {}
    for spec in INPUTS:
        value = given.get(spec.name, "" if spec.data_type == "STRING" else 0)
        if spec.name in ("return_num_input_tokens", "return_num_output_tokens", "return_log_probs"):
            value = True
        shape = (1, 0) if spec.name in lists else (1, 1)
        arrays[spec.name] = np.full(shape, value, kinds[spec.data_type])
    arrays["embedding_bias_weights"] = np.zeros((1, 1), np.float32)
    (found,) = ask(server.grpc_url, arrays)
    assert found.as_numpy("text_output")[0].decode() == ANSWER


def test_a_unary_request_is_refused_over_grpc_and_http(server: TritonServer) -> None:
    """By Triton itself, the model being decoupled: docs/triton.md says which way to go."""
    import tritonclient.grpc as grpc
    from tritonclient.utils import InferenceServerException

    with (
        grpc.InferenceServerClient(server.grpc_url) as client,
        pytest.raises(InferenceServerException, match="doesn't support models with decoupled transaction policy"),
    ):
        client.infer("via_sd", tensors(PROMPT))
    body = {"inputs": [{"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": [PROMPT]}]}
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(
            f"http://{server.http_url}/v2/models/via_sd/infer", json.dumps(body).encode(), timeout=PATIENCE
        )
    assert "doesn't support models with decoupled transaction policy" in refused.value.read().decode()


BROKEN: dict[str, tuple[dict[str, Any], int, str]] = {
    "no text but a count": ({"max_tokens": 3}, 400, "text_input is empty: give the text to continue"),
    "a text for a count": ({"text_input": "a", "max_tokens": "many"}, 500, "non-signed-integer"),
    "a text for a number": ({"text_input": "a", "temperature": "warm"}, 500, "non-number"),
    "a number for a text": ({"text_input": 5}, 500, "non-string"),
    "a number for a flag": ({"text_input": "a", "stream": 1}, 500, "non-boolean"),
    "a count beyond 32 bits": ({"text_input": "a", "max_tokens": 2**40}, 400, "max_tokens is 0, wanted 1 or more"),
    "an object": ({"text_input": "a", "logit_bias": {"3": 5}}, 500, "non-string"),
    "no time": ({"text_input": "a", "timeout": 1}, 400, "the request was not done within 1e-06 s, its time-out"),
}


@pytest.mark.parametrize(("body", "status", "says"), BROKEN.values(), ids=BROKEN.keys())
def test_json_that_cannot_be_served_gets_an_answer_that_says_what_was_wrong(
    body: dict[str, Any], status: int, says: str, server: TritonServer
) -> None:
    found, text = post(server.http_url, "generate", body)
    assert found == status
    assert says in json.loads(text)["error"]


def message(client: GrpcClient, send: Callable[[Any], None]) -> str:
    send(client.client)
    result, error = client.messages.get(timeout=PATIENCE)
    assert result is None
    return str(error.message())


def test_over_grpc_a_missing_text_and_a_parameter_named_like_an_input_are_told_so(client: GrpcClient) -> None:
    without = tensors(PROMPT, max_tokens=3)[1:]
    assert "text_input" in message(client, lambda grpc: grpc.async_stream_infer("via_sd", without))
    given = {"max_tokens": 4}
    said = message(client, lambda grpc: grpc.async_stream_infer("via_sd", tensors(PROMPT), parameters=given))
    assert said == "max_tokens came as a parameter of the request: send it as an input tensor"
    assert client.ask(PROMPT).text == ANSWER


def test_the_client_of_the_examples_ends_after_an_error(server: TritonServer) -> None:
    command = [sys.executable, ROOT / "examples" / "triton_client.py", server.grpc_url, ""]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, timeout=PATIENCE)
    assert done.returncode == 1
    assert "text_input is empty" in done.stderr
