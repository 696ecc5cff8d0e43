"""The model class that Triton's Python backend loads: a pipeline, a scheduler over it, a dispatcher back to Triton."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from via_sd.contract.graphs import DRAFTER, FULL
from via_sd.contract.served_model import (
    CONTRACT,
    DEFAULTS,
    WRITTEN_BY,
    contract_digest,
    parse_default,
    runtime_options,
)
from via_sd.errors import RequestError
from via_sd.runtime import GenerationConfig, Pipeline, load_bundle
from via_sd.runtime.generation.text import encode_text
from via_sd.runtime.triton.channel import Channel
from via_sd.runtime.triton.dispatcher import Dispatcher, Load, Meter
from via_sd.runtime.triton.metrics import Metrics, NoMetrics
from via_sd.runtime.triton.request import Defaults, InvalidRequest, parse_request
from via_sd.runtime.triton.scheduler import Job, Limits, Outcome, Piece, Reason, RequestFailed, Scheduler, Steps
from via_sd.runtime.triton.tiers import TritonEngine
from via_sd.version import __version__

_PARENT_CHECK_SECONDS = 1.0


class TritonPythonModel:
    """One instance: loads its bundle, takes requests as they come, and answers each when it is done."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the bundle that `config.pbtxt` names; an error becomes the reason why it does not load."""
        _end_with_server(os.getppid())
        parameters = _Parameters(json.loads(args["model_config"])["parameters"])
        _check_contract(parameters)
        _check_placement(args, parameters.text("backend", "onnxruntime"))
        folder = Path(args["model_repository"]) / args["model_version"]
        limits = Limits(
            slots=parameters.integer("slots", 4),
            queue=parameters.integer("queue", 128),
            queue_timeout=parameters.seconds("queue_timeout"),
            request_timeout=parameters.seconds("request_timeout"),
        )
        self._pipeline = _load_pipeline(folder / parameters.text("bundle", "bundle"), parameters, limits)
        self._defaults = _defaults(parameters, self._pipeline)
        self._dispatcher = Dispatcher(_meter(args, limits), pb_utils.Logger.log_error)
        self._scheduler = Scheduler(self._dispatcher, limits)
        self._dispatcher.start(self._scheduler.cancel, lambda: Load(*self._scheduler.load, self._pipeline.passes))

    def execute(self, requests: list[Any]) -> None:
        """Takes in requests and returns at once; their responses follow from other threads."""
        for request in requests:
            channel = Channel(request.get_response_sender())
            job = Job(channel, timeout=request.timeout() / 1e6 or None)
            try:
                tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
                sent = json.loads(request.parameters() or "{}")
                channel.request = parse_request(tensors, sent, self._defaults)
                job.timeout = job.timeout or channel.request.timeout
                prompt, options = channel.request.prompt, channel.request.options
                stream = self._pipeline.stream(prompt, cancel=job.cancelled, **options)
                channel.prompt_tokens = stream.prompt_tokens
                job.steps, job.ready = _steps(stream), stream.ready
            except Exception as error:  # noqa: BLE001 - every request gets an answer
                self._scheduler.refuse(job, _explain(error))
            else:
                self._scheduler.submit(job)

    def finalize(self) -> None:
        """Ends the threads; Triton calls this when the last request has been answered."""
        self._scheduler.close()
        self._dispatcher.close()


class _Parameters:
    """The `parameters` of `config.pbtxt`, each with a default."""

    def __init__(self, parameters: Mapping[str, Mapping[str, str]]) -> None:
        self._values = {name: value["string_value"] for name, value in parameters.items()}

    def text(self, name: str, default: Any) -> Any:
        return self._values.get(name) or default

    def flag(self, name: str) -> bool:
        return bool(self._values.get(name) == "true")

    def integer(self, name: str, default: Any) -> Any:
        value = self.text(name, None)
        if value is None:
            return default
        try:
            return int(value)
        except ValueError:
            raise pb_utils.TritonModelException(f"parameter {name} is {value!r}, wanted a whole number") from None

    def seconds(self, name: str) -> float | None:
        value = self.text(name, None)
        try:
            return float(value) if value is not None else None
        except ValueError:
            raise pb_utils.TritonModelException(f"parameter {name} is {value!r}, wanted seconds") from None


def _check_contract(parameters: _Parameters) -> None:
    """Refuse a repository whose tensors and parameters another release defined."""
    if parameters.text(CONTRACT, None) != contract_digest():
        raise pb_utils.TritonModelException(
            f"this model was written by via-sd-export {parameters.text(WRITTEN_BY, 'of an unknown version')}, and "
            f"{__version__}, which is installed, has other inputs, outputs or parameters: write the model again with "
            "via-sd-export triton"
        )


def _check_placement(args: Mapping[str, str], backend: str) -> None:
    if args["model_instance_kind"] != "GPU":
        return
    if backend in ("onnxruntime", "portable-cpu"):
        pb_utils.Logger.log_warn(f"{args['model_name']} is placed on a GPU, but {backend} computes on the CPU")
    elif args["model_instance_device_id"] != "0":
        raise pb_utils.TritonModelException(
            f"{args['model_name']} is placed on GPU {args['model_instance_device_id']}, and {backend} takes the first "
            "one there is: run a server for every GPU, with CUDA_VISIBLE_DEVICES"
        )


def _load_pipeline(folder: Path, parameters: _Parameters, limits: Limits) -> Pipeline:
    # The scheduler hands out the slots, so none is ever waited for here; no patience turns a slip into an error.
    slots: dict[str, Any] = {"max_sequences": limits.slots, "retained_slots": limits.slots, "slot_timeout": 0.0}
    models = parameters.text("verifier_models", None)
    if models is None:
        options = {
            "backend": parameters.text("backend", None),
            "threads": parameters.integer("threads", None),
            # What its instances are placed on is logged; the graphs of a bundle run on the CPU.
            "device": "cpu" if parameters.text("backend", "onnxruntime") == "onnxruntime" else None,
            "trust_engines": parameters.flag("trust_engines"),
        }
        pipeline = Pipeline.load(folder, **slots, **{name: value for name, value in options.items() if value})
        policy = "was not calibrated here" if pipeline.policy is None else f"means {pipeline.policy.auto['mode']} here"
        pb_utils.Logger.log_info(f"{folder}: mode auto {policy}")
        return pipeline
    bundle = load_bundle(folder)
    described = bundle.manifest["drafter"]
    verifier = TritonEngine(json.loads(models), bundle.manifest["verifier"], bundle.max_seq_len, _infer)
    drafter = None
    if described["kind"] == "model":
        model = parameters.text("drafter_model", DRAFTER)
        drafter = TritonEngine({FULL: model}, described, described["max_seq_len"], _infer)
    return Pipeline(bundle, verifier, drafter, **slots)


def _defaults(parameters: _Parameters, pipeline: Pipeline) -> Defaults:
    """What requests leave out, tried on the runtime so that a bad value shows when the model loads."""
    texts = {name: text for name in DEFAULTS if (text := parameters.text(name, None)) is not None}
    try:
        options: dict[str, Any] = {name: parse_default(name, text) for name, text in texts.items()}
        pipeline.resolve(GenerationConfig(**runtime_options(options)))
    except (ValueError, RequestError) as error:
        raise pb_utils.TritonModelException(f"a parameter of the model's configuration is wrong: {error}") from None
    tokens_of = partial(encode_text, pipeline.tokenizer, what="a text of embedding_bias_words")
    return Defaults(parameters.flag("apply_chat_template"), options, pipeline.eos_token_ids, tokens_of)


def _infer(model: str, inputs: Mapping[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
    """Runs another model of this server."""
    request = pb_utils.InferenceRequest(
        model_name=model,
        inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
        requested_output_names=list(outputs),
        preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU),
    )
    response = request.exec()
    if response.has_error():
        raise RuntimeError(f"model {model}: {response.error().message()}")
    tensors = {tensor.name(): tensor for tensor in response.output_tensors()}
    # Copied out of Triton's shared memory, which the response gives back when it goes.
    return {name: np.array(tensors[name].as_numpy()) for name in outputs}


def _meter(args: Mapping[str, str], limits: Limits) -> Meter:
    labels = {
        "model": args["model_name"],
        "version": args["model_version"],
        "instance": args["model_instance_name"],
    }
    try:
        return Metrics(pb_utils, labels, limits.slots)
    except pb_utils.TritonModelException as error:
        pb_utils.Logger.log_info(f"{args['model_name']} reports no figures of its own: {error}")
        return NoMetrics()


def _steps(stream: Any) -> Steps:
    """A runtime's stream as the scheduler wants it."""
    try:
        for chunk in stream:
            yield Piece(chunk.text, len(chunk.token_ids))
    except Exception as error:
        raise _explain(error) from error
    finally:
        stream.close()
    done = stream.completion
    if done.finish_reason == "cancelled":
        raise RequestFailed(Reason.CANCELLED, "the client cancelled the request")
    log_probs = None if done.logprobs is None else [token.logprob for token in done.logprobs]
    return Outcome(done.text, done.finish_reason, done.prompt_tokens, done.stats, log_probs)


def _explain(error: Exception) -> RequestFailed:
    if isinstance(error, RequestFailed):
        return error
    if isinstance(error, (InvalidRequest, RequestError)):
        return RequestFailed(Reason.INVALID, str(error))
    return RequestFailed(Reason.INTERNAL, f"{type(error).__name__}: {error}")


def _end_with_server(server: int) -> None:
    """Ends this process when the server's has gone without a word: it would hold its memory for ever."""

    def watch() -> None:
        while os.getppid() == server:
            time.sleep(_PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
