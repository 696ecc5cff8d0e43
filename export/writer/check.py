"""The exporter checks itself: the written graph against transformers on the same checkpoint, or against its source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from via_sd.contract.graphs import KEEP, LOGITS, PRESENT, kv_place, step_arrays
from via_sd.errors import ExportError
from via_sd.export.failures import one_message
from via_sd.export.passes.attention_semantics import semantics_of
from via_sd.export.sources.source_graph import SourceGraph, run_source
from via_sd.export.writer.stepper import Stepper

#: Largest logit difference allowed in float32, as a share of the largest logit (at least 10).
FP32_TOLERANCE = 1e-4
#: The same in float16, whose numbers have 11 bits; SmolLM2-135M differs by 0.004 of its largest logit.
FP16_TOLERANCE = 2e-2
#: Mean KL divergence in nats up to which a quantised model passes for that model. Small models lose a lot to int4 on
#: the random text used here (0.99 for a 135M one); a graph that computes something else is several times further.
QUANTISED_KL = 3.0
#: Tokens of the prefill (more where a window is wider), and of the steps behind it.
_PREFILL, _STEPS = 40, (5, 1, 1)


@dataclass(frozen=True)
class CheckResult:
    """Full verifier against its reference: positions compared, differences of logits and probabilities (nats)."""

    positions: int
    max_abs_difference: float
    mean_kl: float
    top1_agreement: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Reference:
    """What a model computes for a text of random tokens that passes every attention window.

    Attributes:
        chunks: the steps in which a graph is fed the `tokens`: a prefill, five tokens, single tokens.
        computed_by: what computed the `logits`: `transformers` in float32, or `the source graph` in ONNX Runtime.
    """

    tokens: np.ndarray
    chunks: list[int]
    logits: np.ndarray
    max_seq_len: int
    computed_by: str = "transformers"


def reference_steps(config: Mapping[str, Any], max_seq_len: int) -> list[int]:
    """Sizes of the steps in which a text is compared: a prefill that passes every attention window, and the rest."""
    windows = [s.window for s in semantics_of(dict(config)) if 0 < s.window < max_seq_len]
    steps = [step for step in _STEPS if max_seq_len > _PREFILL]
    return [min(max([_PREFILL, *(window + 8 for window in windows)]), max_seq_len - sum(steps)), *steps]


def reference_logits(load: Callable[[], Any], max_seq_len: int, config: dict[str, Any]) -> Reference:
    """Run a model in transformers (float32, eager attention) as the reference of `check_logits`.

    Args:
        load: returns the model.

    Raises:
        ExportError: transformers cannot load or run it.
    """
    import torch

    tokens, chunks = _text(config, max_seq_len)
    with one_message("transformers cannot run the checkpoint", advice="--no-check exports without the comparison"):
        model = load()
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens[None])).logits[0].numpy()
    return Reference(tokens, chunks, logits, max_seq_len)


def source_logits(source: SourceGraph, max_seq_len: int, config: dict[str, Any]) -> Reference:
    """Run the graph that was exported from, as it came, as the reference of `check_logits`."""
    tokens, chunks = _text(config, max_seq_len)
    return Reference(tokens, chunks, run_source(source, tokens, chunks, max_seq_len), max_seq_len, "the source graph")


def _text(config: dict[str, Any], max_seq_len: int) -> tuple[np.ndarray, list[int]]:
    """Random tokens, and the steps they are fed in."""
    chunks = reference_steps(config, max_seq_len)
    return np.random.default_rng(0).integers(0, int(config["vocab_size"]), sum(chunks)), chunks


def check_logits(
    graph: Stepper, reference: Reference, *, quantised: bool, tolerance: float = FP32_TOLERANCE
) -> CheckResult:
    """Feed the reference's text to the full tier of `graph` in its steps and compare every logit.

    Args:
        quantised: the weights were quantised on the way from what the reference ran. Weights that came quantised were
            not: the same kernels then run on the same bytes, and were bit-equal wherever that was measured.
        tolerance: largest logit difference allowed where they were not, as a share of the largest logit (at least 10).

    Raises:
        ExportError: they differ by more than float32 rounding, or than quantisation, explains.
    """
    if not np.isfinite(reference.logits).all():
        raise ExportError(
            f"{reference.computed_by} gives NaN or Inf among its logits: the weights are damaged; fetch or "
            "export the model again"
        )
    found = run_graph(graph, reference.tokens, reference.chunks, reference.max_seq_len)
    result = compare_logits(found, reference.logits)
    limit = tolerance * max(10.0, float(np.abs(reference.logits).max()))
    if tolerance != FP32_TOLERANCE and not quantised and not result.max_abs_difference <= limit:
        raise ExportError(
            f"the graph in float16 differs from {reference.computed_by} by {result.max_abs_difference:.3g} in a logit "
            f"(limit {limit:.3g}), and in float32 it does not: float16 ruins this model; try --precision fp32 or int8, "
            "or --no-check"
        )
    if not quantised and not result.max_abs_difference <= limit:
        raise ExportError(
            f"the exported graph differs from {reference.computed_by} by {result.max_abs_difference:.3g} in a logit "
            f"(limit {limit:.3g}): this architecture is not exported right; --no-check writes the bundle all the same"
        )
    if quantised and not result.mean_kl <= QUANTISED_KL:
        raise ExportError(
            f"the quantised graph is {result.mean_kl:.3g} nats (KL) from {reference.computed_by}, limit "
            f"{QUANTISED_KL}: quantisation ruins this model; try --precision fp32, or --no-check"
        )
    return result


def compare_logits(found: np.ndarray, wanted: np.ndarray) -> CheckResult:
    """Compare logits [positions, vocab]; a NaN counts as an infinite difference."""
    difference = float(np.abs(found - wanted).max())
    p, q = log_softmax(wanted), log_softmax(found)
    kl = float((np.exp(p) * (p - q)).sum(-1).mean())
    agreement = float((found.argmax(-1) == wanted.argmax(-1)).mean())
    return CheckResult(
        len(found),
        difference if np.isfinite(difference) else float("inf"),
        kl if np.isfinite(kl) else float("inf"),
        agreement,
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural log-probabilities in float64 along the last axis."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def run_graph(graph: Stepper, tokens: np.ndarray, chunks: Sequence[int], max_seq_len: int) -> np.ndarray:
    """Feed `tokens` to the full tier in steps of `chunks` tokens; logits [tokens, vocab] of every position."""
    return np.concatenate([outputs[LOGITS.name][0] for outputs in run_steps(graph, tokens, chunks, max_seq_len)])


def run_steps(
    graph: Stepper, tokens: np.ndarray, chunks: Sequence[int], max_seq_len: int
) -> Iterator[dict[str, np.ndarray]]:
    """Feed `tokens` to the full tier in steps of `chunks` tokens; every output but the KV, by name, after each step."""
    keep: dict[str, np.ndarray] = {}
    buffers = []
    for value in graph.session.get_inputs():
        if value.name == KEEP.name:
            keep[KEEP.name] = np.ones(value.shape, bool)
        elif (place := kv_place(value.name)) is not None:
            present = PRESENT.format(layer=place[0], part=place[1])
            graph.hold(value.name, present, [1, value.shape[1], max_seq_len, value.shape[3]])
            buffers.append(present)
    wanted = [value.name for value in graph.session.get_outputs() if value.name not in buffers]
    past = 0
    for size in chunks:
        yield graph.step(step_arrays(tokens[past : past + size], past, size) | keep, wanted)
        past += size
