"""What a mask costs in time: what each sublayer of a kind, and the LM head, takes of a decoding step in each state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from via_sd.errors import MaskError
from via_sd.masks.mask import Mask


@dataclass(frozen=True)
class StepCosts:
    """Shares of a decoding step of the full model, which is 1.

    Attributes:
        attention: of one attention sublayer, by state.
        mlp: of one MLP sublayer, by state.
        head: of the LM head, by state; what it takes more or less than in state `keep`.
        rest: of everything else, the LM head in state `keep` included.
    """

    attention: Mapping[str, float]
    mlp: Mapping[str, float]
    head: Mapping[str, float]
    rest: float

    def of(self, mask: Mask) -> float:
        """What a decoding step under `mask` takes of a step of full.

        Raises:
            MaskError: a state that was not measured.
        """
        parts = ((self.attention, mask.attention), (self.mlp, mask.mlp), (self.head, (mask.head,)))
        unknown = sorted({state for known, states in parts for state in states if state not in known})
        if unknown:
            raise MaskError(f"there is no cost of the states {', '.join(unknown)}")
        return self.rest + sum(known[state] for known, states in parts for state in states)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepCosts:
        """Read what `to_json` made; raises `KeyError`, `TypeError` or `ValueError` for anything else."""
        parts = {
            name: {str(state): float(cost) for state, cost in dict(data[name]).items()}
            for name in ("attention", "mlp", "head")
        }
        return cls(**parts, rest=float(data["rest"]))
