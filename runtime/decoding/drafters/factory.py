"""From the kind of drafter that a bundle names to the drafter of one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from via_sd.contract.graphs import FULL
from via_sd.errors import BundleError
from via_sd.runtime.decoding.cache import SequenceCache
from via_sd.runtime.decoding.drafters.model import ModelDrafter
from via_sd.runtime.decoding.drafters.ngram import NgramDrafter
from via_sd.runtime.decoding.drafters.protocol import Drafter
from via_sd.runtime.decoding.sampling import Processor


def new_drafter(
    described: Mapping[str, Any],
    verifier: SequenceCache,
    own: SequenceCache | None,
    processor: Processor,
    *,
    seed: int,
    cost: float,
) -> Drafter:
    """The drafter of one sequence.

    Args:
        described: the manifest's `drafter`.
        verifier: the verifier's cache of the sequence, which a mask drafts with.
        own: the drafter's, if it has a model of its own.
        cost: of one drafted token, see `CostModel.draft`.

    Raises:
        BundleError: an unknown kind.
    """
    kind, width = described["kind"], verifier.engine.vocab_size
    if kind == "ngram":
        return NgramDrafter()
    if kind == "mask":
        tier, capacity = described["tier"], verifier.engine.max_seq_len
        return ModelDrafter(
            verifier, tier, processor, seed, vocabulary=width, widths=(width, width), capacity=capacity, cost=cost
        )
    if kind == "model" and own is not None:
        vocabulary, widths = described["shared_vocab"], (own.engine.vocab_size, width)
        capacity = own.engine.max_seq_len
        return ModelDrafter(
            own, FULL, processor, seed, vocabulary=vocabulary, widths=widths, capacity=capacity, cost=cost
        )
    raise BundleError(f"drafter kind {kind!r} is not known; export the bundle with this release")
