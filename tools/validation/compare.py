"""Compare the tiers of a bundle with transformers on its checkpoint, output by output, through Polygraphy's comparator.

A tier is fed a text in the steps decoding takes (a prefill past every attention window, several tokens at an offset,
single tokens); compared are the logits of every position and the KV it leaves behind, so that a layer that computes
something else is named. What a slim-verifier skips is skipped in transformers too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from via_sd.contract.graphs import INPUT_IDS, LOGITS
from via_sd.errors import ExportError, ValidationError
from via_sd.export.writer.check import compare_logits, reference_steps
from via_sd.masks import Mask
from via_sd.progress import Progress, no_progress
from via_sd.runtime.engines.protocol import ReadableEngine
from via_sd.runtime.engines.rows import logits_of

OURS, REFERENCE = "via-sd", "transformers"
_TOKENS = INPUT_IDS.name
#: Text as a model knows it: on random tokens rounding and quantisation do far more than they ever do in use.
TEXT = (
    "The lighthouse stands on a rock at the mouth of the bay. Every evening its keeper climbs the stairs, counts them, "
    "and lights the lamp; every morning he writes down the ships that passed, and whether the wind has turned."
)


@dataclass(frozen=True)
class Tolerance:
    """When an output passes: its `statistic` of the differences is within `absolute` or within `relative`.

    Attributes:
        statistic: `elemwise` holds every element to it; `median` is for arithmetic whose rounding is no error. The
            median of a single position says little, so logits are then one output over all of them.
    """

    statistic: str
    absolute: float
    relative: float


#: By precision of weights, activations and KV.
TOLERANCES = {
    "fp32": Tolerance("elemwise", 1e-3, 1e-3),
    "fp16": Tolerance("median", 0.0, 0.02),
    "bf16": Tolerance("median", 0.0, 0.1),
    "int8": Tolerance("median", 0.0, 0.2),
    "int4": Tolerance("median", 0.0, 0.9),
}


@dataclass(frozen=True)
class OutputReport:
    """Statistics of the differences of one output, and whether they are within the tolerance."""

    name: str
    passed: bool
    max_abs: float
    mean_abs: float
    median_abs: float
    max_rel: float
    mean_rel: float
    median_rel: float


@dataclass(frozen=True)
class TierReport:
    """One tier against transformers.

    Attributes:
        finite: no NaN and no infinity in any output of either side.
        mean_kl: nats, over every position.
        top1_agreement: share of positions with the same likeliest token.
    """

    tier: str
    finite: bool
    mean_kl: float
    top1_agreement: float
    outputs: tuple[OutputReport, ...]

    @property
    def passed(self) -> bool:
        return self.finite and all(output.passed for output in self.outputs)


def validate_model(
    engine: ReadableEngine,
    load: Callable[[], Any],
    config: Mapping[str, Any],
    masks: Mapping[str, Mask],
    tokenizer: Tokenizer,
    tolerances: Mapping[str, Tolerance],
    *,
    layers: int | None = None,
    progress: Progress = no_progress,
) -> list[TierReport]:
    """Compare every tier of `engine` that has no bridges: transformers has nothing like them.

    Args:
        load: returns the model in transformers; `config` is its configuration.
        masks: what tiers skip, by name; a tier that is not there skips nothing.
        tokenizer: turns `TEXT` into what is fed.
        tolerances: what each tier is held to, by name.
        layers: compare the KV of the first so many layers; of all by default.

    Raises:
        ValidationError: Polygraphy is not installed.
        ExportError: the checkpoint's layers are not attention and MLP as transformers usually names them.
    """
    _polygraphy()
    progress("loading the checkpoint in transformers", None)
    steps = reference_steps(config, engine.max_seq_len)
    tokens = np.resize(np.array(tokenizer.encode(TEXT).ids, np.int64), sum(steps))  # repeated where it is too short
    model = load()
    number = int(engine.kv["num_layers"])
    reports = []
    for tier in engine.tiers:
        mask = masks.get(tier)
        if mask is not None and mask.bridges:
            continue
        progress(f"comparing tier {tier}", None)
        kept = [i for i in range(number) if mask is None or mask.keep_attention[i]]
        compared = [i for i in kept if layers is None or i < layers]
        tolerance = tolerances[tier]
        task = _Task(tier, mask, steps, compared, engine.kv["parts"], tolerance.statistic == "elemwise")
        reports.append(_compare(engine, model, task, tokens, tolerance))
    return reports


@dataclass(frozen=True)
class _Task:
    """What is compared of one tier: logits of the `steps`, of each `apart` or of all as one, and KV of the `layers`."""

    tier: str
    mask: Mask | None
    steps: list[int]
    layers: list[int]
    parts: list[str]
    apart: bool

    def logits(self, of_steps: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs that are made of the logits of every step."""
        if not self.apart:
            return {LOGITS.name: np.concatenate(of_steps)}
        return {name: logits for (name, *_), logits in zip(self.spans(), of_steps, strict=True)}

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Name of the logits of a step, and the positions they are of."""
        past = 0
        for size in self.steps:
            yield f"logits of {size} at {past}", past, past + size
            past += size


def _compare(engine: ReadableEngine, model: Any, task: _Task, tokens: np.ndarray, tolerance: Tolerance) -> TierReport:
    from polygraphy.comparator import Comparator, SimpleCompareFunc
    from polygraphy.logger import G_LOGGER

    simple = SimpleCompareFunc(atol=tolerance.absolute, rtol=tolerance.relative, check_error_stat=tolerance.statistic)
    reports: list[OutputReport] = []

    def recorded(ours: Any, theirs: Any) -> Any:
        found = simple(ours, theirs)
        reports.extend(_report(name, result) for name, result in found.items())
        return found

    runners = [
        _runner(OURS, lambda feed: _our_outputs(engine, task, feed[_TOKENS][0])),
        _runner(REFERENCE, lambda feed: _their_outputs(model, task, feed[_TOKENS][0])),
    ]
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        results = Comparator.run(runners, data_loader=[{_TOKENS: tokens[None]}])
        finite = bool(Comparator.validate(results, check_inf=True, check_nan=True))
        Comparator.compare_accuracy(results, compare_func=recorded)
    names = [output for output in results[OURS][0] if output.startswith(LOGITS.name)]
    logits = [np.concatenate([results[name][0][output] for output in names]) for name in (OURS, REFERENCE)]
    difference = compare_logits(*logits)
    return TierReport(task.tier, finite, difference.mean_kl, difference.top1_agreement, tuple(reports))


def _report(name: str, result: Any) -> OutputReport:
    if not hasattr(result, "max_absdiff"):  # shapes differ, or one side has no such output
        return OutputReport(name, False, *[float("inf")] * 6)
    figures = ("max_absdiff", "mean_absdiff", "median_absdiff", "max_reldiff", "mean_reldiff", "median_reldiff")
    return OutputReport(name, bool(result), *(float(getattr(result, figure)) for figure in figures))


def _our_outputs(engine: ReadableEngine, task: _Task, tokens: np.ndarray) -> dict[str, np.ndarray]:
    buffers = engine.new_buffers()
    outputs = task.logits(
        [
            logits_of(buffers.forward(task.tier, tokens[start:stop].tolist(), start, stop - start))
            for _, start, stop in task.spans()
        ]
    )
    for layer in task.layers:
        for part, values in zip(task.parts, buffers.keys_values(layer), strict=True):
            outputs[f"{part} of layer {layer}"] = values[:, : len(tokens)].copy()
    return outputs


def _their_outputs(model: Any, task: _Task, tokens: np.ndarray) -> dict[str, np.ndarray]:
    import torch
    from transformers import DynamicCache

    with torch.no_grad(), _skipping(model, task.mask):
        cache = DynamicCache()  # told nothing of windows, it keeps every position
        logits = model(torch.from_numpy(tokens[None]), cache=cache).logits[0].numpy()
    outputs = task.logits([logits[start:stop] for _, start, stop in task.spans()])
    for layer in task.layers:
        kept: Any = cache.layers[layer]
        for part, values in zip(task.parts, (kept.keys, kept.values), strict=True):
            outputs[f"{part} of layer {layer}"] = values[0].numpy()
    return outputs


@contextlib.contextmanager
def _skipping(model: Any, mask: Mask | None) -> Iterator[None]:
    """A sublayer the mask skips adds nothing to the residual stream."""
    import torch

    def silence(module: Any, inputs: Any, output: Any) -> Any:
        return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)

    with contextlib.ExitStack() as stack:
        for name, keep in () if mask is None else (("self_attn", mask.keep_attention), ("mlp", mask.keep_mlp)):
            for layer, module in enumerate(model.get_decoder().layers):
                if keep[layer]:
                    continue
                if not hasattr(module, name):
                    raise ExportError(f"layer {layer} of {type(model).__name__} has no {name} to skip")
                stack.callback(getattr(module, name).register_forward_hook(silence).remove)
        yield


def _runner(name: str, infer: Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]) -> Any:
    """A Polygraphy runner over a function from the text, int64 [1, tokens], to named outputs."""
    from polygraphy.backend.base import BaseRunner
    from polygraphy.common import TensorMetadata

    class Runner(BaseRunner):  # type: ignore[misc]
        def get_input_metadata_impl(self) -> Any:
            return TensorMetadata().add(_TOKENS, np.int64, (1, -1))

        def infer_impl(self, feed_dict: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            self.inference_time = 0.0
            return infer(feed_dict)

    return Runner(name)


def _polygraphy() -> None:
    try:
        import polygraphy  # noqa: F401
    except ImportError:
        raise ValidationError("validate needs Polygraphy: pip install 'via-sd-export[polygraphy]'") from None
