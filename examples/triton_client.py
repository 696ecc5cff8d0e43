"""Stream text from a Triton server over gRPC.

    python triton_client.py HOST:PORT PROMPT

It needs `tritonclient[grpc]` (the extra `triton`), and a server with a model repository of `via-sd-export triton`.
"""

import queue
import sys

import numpy as np
import tritonclient.grpc as grpc

address, prompt = sys.argv[1:]


def tensor(name: str, datatype: str, value: object) -> grpc.InferInput:
    """An input of shape [1, 1]."""
    array = np.array([[value]], dtype={"BYTES": np.object_, "BOOL": np.bool_, "INT32": np.int32}[datatype])
    made = grpc.InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array)
    return made


answers: queue.Queue = queue.Queue()
inputs = [
    tensor("text_input", "BYTES", prompt.encode()),
    tensor("apply_chat_template", "BOOL", True),
    tensor("stream", "BOOL", True),
    tensor("max_tokens", "INT32", 48),
]
with grpc.InferenceServerClient(address) as client:  # one that is left open may keep the program from ending
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    client.async_stream_infer("via_sd", inputs, enable_empty_final_response=True)
    final = False
    while not final:
        result, error = answers.get()
        if error:
            raise error
        response = result.get_response()
        text = result.as_numpy("text_output")
        if text is not None:
            print(text[0].decode(), end="", flush=True)
        if (reason := result.as_numpy("finish_reason")) is not None:
            print(f"\nended by {reason[0, 0].decode()}")
        final = response.parameters["triton_final_response"].bool_param
