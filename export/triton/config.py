"""`config.pbtxt` of the served model: tensors from the contract, placement and parameters from the options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from via_sd.contract.served_model import (
    CONTRACT,
    INPUTS,
    OUTPUTS,
    WRITTEN_BY,
    TensorSpec,
    contract_digest,
    parse_default,
)
from via_sd.errors import RepositoryError
from via_sd.export.triton.pbtxt import Message, Word, string_map, to_pbtxt
from via_sd.version import __version__

WARMUP_FOLDER = "warmup"
WARMUP_PROMPT = "Hello"
WARMUP_TOKENS = 4


@dataclass(frozen=True)
class ServingOptions:
    """How the model is served; everything but placement ends up in `parameters`, where an operator can change it.

    Attributes:
        defaults: what requests leave out, as texts by name (`mode`, `max_tokens`, `max_divergence`, …; see
            `contract.DEFAULTS`).
        backend: what runs the graphs, as the runtime calls it (`onnxruntime`, `tensorrt`, …); its default if None.
        trust_engines: whether TensorRT engines may run that were not built where the server runs.
        slots: sequences that run at once in one instance, each with KV buffers of its own; they share forward passes.
        threads: threads of one forward pass; the engine's choice if None.
        queue: requests that may wait for a slot; more are turned away.
        queue_timeout: seconds a request may wait for a slot; None: no limit.
        request_timeout: seconds from arrival to the last token for requests that bring no time-out; None: no limit.
        apply_chat_template: whether requests that do not say get the chat template.
        instances: processes that each load the bundle, per GPU if there are any.
        gpus: devices to place instances on; none: CPU.
        environment: a Python environment for the Python backend, `EXECUTION_ENV_PATH`; None: the server's own.
        unsigned_counts: whether whole numbers are UINT32 inputs, as some clients send them, and not INT32. Triton
            takes one type of each input only.

    Raises:
        RepositoryError: a number outside its range, or a default of no such name or type.
    """

    defaults: Mapping[str, str] = field(default_factory=dict)
    backend: str | None = None
    trust_engines: bool = False
    slots: int = 4
    threads: int | None = None
    queue: int = 128
    queue_timeout: float | None = None
    request_timeout: float | None = None
    apply_chat_template: bool = False
    instances: int = 1
    gpus: tuple[int, ...] = ()
    environment: str | None = None
    unsigned_counts: bool = False

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("threads", 1), ("queue", 0), ("instances", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise RepositoryError(f"{name} is {value}, wanted {least} or more")
        for name in ("queue_timeout", "request_timeout"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise RepositoryError(f"{name} is {value:g} s, wanted more than 0")
        for name, text in self.defaults.items():
            try:
                parse_default(name, text)
            except ValueError as error:
                raise RepositoryError(str(error)) from None

    def parameters(self) -> dict[str, str]:
        """The `parameters` that the model reads; what is None is left out."""
        elsewhere = ("defaults", "instances", "gpus", "environment", "unsigned_counts")
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in elsewhere}
        # A flag is there or it is not; 0 is a value.
        given = {name: value for name, value in values.items() if value is not None and value is not False}
        return {**{name: "true" if value is True else str(value) for name, value in given.items()}, **self.defaults}

    def instance_group(self) -> list[Message]:
        """Where instances run and how many."""
        if self.gpus:
            return [{"count": self.instances, "kind": Word("KIND_GPU"), "gpus": self.gpus}]
        return [{"count": self.instances, "kind": Word("KIND_CPU")}]


def model_config(
    name: str,
    bundle: str,
    options: ServingOptions,
    *,
    warm_up: bool = True,
    extra: Mapping[str, str] | None = None,
) -> str:
    """`config.pbtxt` of the model `name`.

    Args:
        bundle: path of the bundle, absolute or relative to the version's folder.
        warm_up: whether every instance answers a short request before the model is ready.
        extra: further parameters.
    """
    parameters = {
        "bundle": bundle,
        WRITTEN_BY: __version__,
        CONTRACT: contract_digest(),
        **options.parameters(),
        **(extra or {}),
    }
    if options.environment:
        parameters["EXECUTION_ENV_PATH"] = options.environment
    config: dict[str, Message | list[Message] | str | int] = {
        "name": name,
        "backend": "python",
        # Inputs are [1, n]: clients of TensorRT-LLM's models send a batch dimension, and so does the OpenAI front end.
        # Requests are batched over time by the model's own scheduler, not by Triton.
        "max_batch_size": 1,
        "model_transaction_policy": {"decoupled": True},
        "input": [_tensor(_as_sent(spec, options), is_input=True) for spec in INPUTS],
        "output": [_tensor(spec, is_input=False) for spec in OUTPUTS],
        "instance_group": options.instance_group(),
        "parameters": string_map(parameters),
    }
    if warm_up:
        config["model_warmup"] = [_warm_up(options)]
    return to_pbtxt(config)


def _as_sent(spec: TensorSpec, options: ServingOptions) -> TensorSpec:
    """The input as the model's clients send it."""
    count = options.unsigned_counts and spec.data_type == "INT32" and spec.dims == (1,)
    return replace(spec, data_type="UINT32") if count else spec


def _tensor(spec: TensorSpec, *, is_input: bool) -> Message:
    message: dict[str, str | bool | list[int]] = {
        "name": spec.name,
        "data_type": Word(f"TYPE_{spec.data_type}"),
        "dims": list(spec.dims),
    }
    if is_input and spec.optional:
        message["optional"] = True
    return message


def _warm_up(options: ServingOptions) -> Message:
    files = {"text_input": "TYPE_STRING", "max_tokens": "TYPE_UINT32" if options.unsigned_counts else "TYPE_INT32"}
    return {
        "name": "a_few_tokens",
        "batch_size": 1,
        "inputs": [
            {"key": name, "value": {"data_type": Word(kind), "dims": [1], "input_data_file": name}}
            for name, kind in files.items()
        ],
    }


def warm_up_files() -> dict[str, bytes]:
    """Content of the files that the warm-up request reads, by name: a string is its length in 4 bytes and its bytes."""
    prompt = WARMUP_PROMPT.encode("utf-8")
    return {
        "text_input": len(prompt).to_bytes(4, "little") + prompt,
        "max_tokens": WARMUP_TOKENS.to_bytes(4, "little"),
    }
