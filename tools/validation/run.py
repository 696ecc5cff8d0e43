"""Validate a bundle: every tier of its verifier, and its model drafter, against their checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from via_sd.contract.graphs import DRAFTER, VERIFIER
from via_sd.contract.manifest import TOKENIZER_FILE
from via_sd.errors import ValidationError
from via_sd.export.sources.checkpoint import Checkpoint, open_checkpoint
from via_sd.masks import Mask, ModelIdentity
from via_sd.progress import Progress, no_progress
from via_sd.runtime import Bundle, load_bundle
from via_sd.runtime.engines.backends import ONNXRUNTIME, open_engines
from via_sd.runtime.engines.protocol import ReadableEngine
from via_sd.tools.validation.compare import TOLERANCES, TierReport, Tolerance, validate_model

#: Name of the KV buffers' dtype -> precision of a backend over graphs that `build` made.
_PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Validation:
    """What a comparison with transformers found.

    Attributes:
        backend, precision: what ran the bundle, and the precision it computes in.
        tolerance: what the outputs of full were held to; a tier in fewer bits is held to that of its bits.
        not_compared: tiers with bridges, which transformers does not have.
        models: a report for each tier of the `verifier`, and for the `drafter` where it was compared.
    """

    backend: str
    precision: str
    tolerance: Tolerance
    models: Mapping[str, list[TierReport]]
    not_compared: tuple[str, ...] = ()

    @property
    def failed(self) -> list[TierReport]:
        """The tiers that do not pass."""
        return [report for reports in self.models.values() for report in reports if not report.passed]

    def to_json(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "precision": self.precision,
            "tolerance": asdict(self.tolerance),
            "passed": not self.failed,
            "not_compared": list(self.not_compared),
            "models": {
                name: [{**asdict(report), "passed": report.passed} for report in reports]
                for name, reports in self.models.items()
            },
        }


@dataclass(frozen=True)
class _Pair:
    """A model of the bundle, and the checkpoint it is compared with."""

    name: str
    engine: ReadableEngine
    reference: str
    identity: ModelIdentity


def validate(
    bundle: Bundle | str | Path,
    reference: str,
    *,
    drafter_reference: str | None = None,
    backend: str = ONNXRUNTIME,
    device: str | None = None,
    trust_engines: bool = False,
    absolute: float | None = None,
    relative: float | None = None,
    layers: int | None = None,
    progress: Progress = no_progress,
) -> Validation:
    """Compare every tier of a bundle with transformers: logits, keys and values, NaN and infinity.

    Args:
        reference: the verifier's checkpoint: directory, hub id, or GGUF file.
        drafter_reference: the checkpoint of a model drafter, which is left out if None.
        backend, device, trust_engines: see `open_engines`.
        absolute, relative: tolerances; those of the precision if None.
        layers: compare keys and values of the first so many layers; of all if None.

    Raises:
        BundleError: a bundle that cannot be read, or a backend that cannot run it.
        ExportError: no checkpoint at a reference, or one whose layers cannot be skipped in transformers.
        ValidationError: a reference that is another model or holds no checkpoint, a drafter that is no model, or
            Polygraphy is not installed.
    """
    loaded = bundle if isinstance(bundle, Bundle) else load_bundle(bundle)
    kind = loaded.manifest["drafter"]["kind"]
    if drafter_reference is not None and kind != "model":
        raise ValidationError(
            f"a reference for the drafter was given, and the drafter of {loaded.path} is {kind}, no model of its own"
        )
    verifier, drafter = open_engines(loaded, backend, device=device, trust_engines=trust_engines)
    precision = loaded.precision if backend == ONNXRUNTIME else _PRECISIONS[verifier.kv["dtype"]]
    masks = loaded.masks if backend == ONNXRUNTIME else {}  # engines are in one precision
    tokenizer = Tokenizer.from_file(str(loaded.file(TOKENIZER_FILE)))
    models = {}
    for pair in _pairs(loaded, verifier, drafter, reference, drafter_reference):
        with open_checkpoint(pair.reference, progress) as checkpoint:
            load = _reference_model(checkpoint, pair, loaded)
            lowest = {tier: _lowest(masks.get(tier), precision) for tier in pair.engine.tiers}
            models[pair.name] = validate_model(
                pair.engine,
                load,
                checkpoint.config,
                loaded.masks if pair.name == VERIFIER else {},
                tokenizer,
                {tier: _tolerance(bits, absolute, relative) for tier, bits in lowest.items()},
                layers=layers,
                progress=progress,
            )
    bridged = tuple(tier for tier, mask in masks.items() if mask.bridges)
    return Validation(backend, precision, _tolerance(precision, absolute, relative), models, bridged)


def _lowest(mask: Mask | None, precision: str) -> str:
    """The precision of the fewest bits that a tier of a bundle in `precision` runs anything in."""
    return mask.precisions[-1] if mask is not None and mask.precisions else precision


def _tolerance(precision: str, absolute: float | None, relative: float | None) -> Tolerance:
    usual = TOLERANCES[precision]
    return replace(
        usual,
        absolute=usual.absolute if absolute is None else absolute,
        relative=usual.relative if relative is None else relative,
    )


def _pairs(
    bundle: Bundle,
    verifier: ReadableEngine,
    drafter: ReadableEngine | None,
    reference: str,
    drafter_reference: str | None,
) -> Iterator[_Pair]:
    yield _Pair(VERIFIER, verifier, reference, bundle.identity)
    if drafter is not None and drafter_reference is not None:
        identity = ModelIdentity.from_json(bundle.manifest["drafter"]["model"])
        yield _Pair(DRAFTER, drafter, drafter_reference, identity)


def _reference_model(checkpoint: Checkpoint, pair: _Pair, bundle: Bundle) -> Callable[[], Any]:
    """What loads the model in transformers, once it is found to be the model of the bundle."""
    if checkpoint.identity != pair.identity:
        raise ValidationError(f"{pair.reference} is another model than the {pair.name} of {bundle.path}")
    if checkpoint.reference is None:
        raise ValidationError(
            f"{pair.reference} holds an ONNX decoder, and validate compares with transformers; give the checkpoint it "
            "was made from (a Hugging Face directory, a hub id, or a GGUF file)"
        )
    return checkpoint.reference
