"""Clients of the served model: Triton's own gRPC client, and plain HTTP."""

from __future__ import annotations

import json
import queue
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MODEL = "via_sd"
_KINDS: dict[str, tuple[str, Any]] = {
    "text_input": ("BYTES", np.object_),
    "mode": ("BYTES", np.object_),
    "stop_words": ("BYTES", np.object_),
    "bad_words": ("BYTES", np.object_),
    "guided_decoding_guide_type": ("BYTES", np.object_),
    "guided_decoding_guide": ("BYTES", np.object_),
    "no_repeat_ngram_size": ("INT32", np.int32),
    "seed": ("UINT64", np.uint64),
    "random_seed": ("UINT64", np.uint64),
    **dict.fromkeys(
        ("max_tokens", "top_k", "beam_width", "num_return_sequences", "min_tokens", "end_id", "pad_id"),
        ("INT32", np.int32),
    ),
    **dict.fromkeys(
        (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "length_penalty",
        ),
        ("FP32", np.float32),
    ),
}
#: Seconds a test waits for a response before it fails.
PATIENCE = 60.0


@dataclass
class Reply:
    """What a client got for one request.

    `finals` counts responses that carried the final flag; an error response ends the request as well.
    """

    chunks: list[str] = field(default_factory=list)
    outputs: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    finals: int = 0

    @property
    def text(self) -> str:
        return "".join(self.chunks)


def tensors(prompt: str | bytes, **values: Any) -> list[Any]:
    """Input tensors of a request, each `[1, n]`."""
    import tritonclient.grpc as grpc

    inputs = []
    for name, value in {"text_input": prompt, **values}.items():
        kind, dtype = _KINDS.get(name, ("BOOL", np.bool_))
        listed = value if isinstance(value, list) else [value]
        plain = [each.encode() if isinstance(each, str) else each for each in listed]
        tensor = grpc.InferInput(name, [1, len(plain)], kind)
        tensor.set_data_from_numpy(np.array([plain], dtype=dtype))
        inputs.append(tensor)
    return inputs


class GrpcClient:
    """One gRPC stream to one model."""

    def __init__(self, url: str, model: str = MODEL) -> None:
        import tritonclient.grpc as grpc

        self.model = model
        self.client = grpc.InferenceServerClient(url)
        self.messages: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._in_flight = 0
        self._open()

    def _open(self) -> None:
        self.client.start_stream(callback=lambda result, error: self.messages.put((result, error)))

    def send(self, prompt: str | bytes, *, request_id: str = "", timeout: int | None = None, **values: Any) -> None:
        """Sends a request and returns; `timeout` is Triton's own, in microseconds."""
        self._in_flight += 1
        self.client.async_stream_infer(
            self.model,
            tensors(prompt, **values),
            request_id=request_id,
            enable_empty_final_response=True,
            timeout=timeout,
        )

    def take(self) -> tuple[Any, Any, bool]:
        """The next message of the stream: result, error, and whether it is the last of its request."""
        result, error = self.messages.get(timeout=PATIENCE)
        final = error is not None or result.get_response().parameters["triton_final_response"].bool_param
        self._in_flight -= final
        return result, error, final

    def receive(self, reply: Reply | None = None) -> Iterator[Reply]:
        """Yields the reply to the request in flight after every response, until its last."""
        reply = reply or Reply()
        while not reply.finals:
            result, error, final = self.take()
            reply.finals += final
            if error is not None:
                reply.error = error.message()
            else:
                for output in result.get_response().outputs:
                    array = result.as_numpy(output.name)
                    if output.name == "text_output":
                        reply.chunks.append(array[0].decode())
                    elif array.dtype == np.object_:
                        reply.outputs[output.name] = array[0, 0].decode()
                    else:
                        reply.outputs[output.name] = array[0, 0] if array.shape == (1, 1) else array[0]
            yield reply

    def ask(self, prompt: str | bytes, **values: Any) -> Reply:
        """Sends a request and waits for all of its reply."""
        self.send(prompt, **values)
        *_, reply = self.receive()
        return reply

    def cancel(self) -> None:
        """Cancels whatever is in flight; the stream is open again afterwards."""
        self.client.stop_stream(cancel_requests=True)
        while not self.messages.empty():
            self.messages.get()
        self._in_flight = 0
        self._open()

    def close(self) -> None:
        """Ends the stream: the server waits for open ones when it stops.

        Cancelling one that has nothing in flight would leave a request behind in the server that keeps the model from
        unloading, so only a stream with something to cancel is cancelled.
        """
        self.client.stop_stream(cancel_requests=self._in_flight > 0)
        self.client.close()

    def __enter__(self) -> GrpcClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def post(url: str, endpoint: str, body: dict[str, Any], model: str = MODEL) -> tuple[int, str]:
    """Status and body of a POST to `generate` or `generate_stream`."""
    request = urllib.request.Request(
        f"http://{url}/v2/models/{model}/{endpoint}", data=json.dumps(body).encode(), method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def events(body: str) -> list[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    return [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: ")]


def metric(url: str, name: str, **labels: str) -> float:
    """A figure of the served model from the server's metrics page, summed over what `labels` leave open."""
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        lines = answer.read().decode().splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    found = [line for line in lines if line.startswith(name + "{") and all(each in line for each in wanted)]
    assert found, f"{name} with {labels} is not on the metrics page"
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether `condition` comes true while a test is willing to wait."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if condition():
            return True
    return False
