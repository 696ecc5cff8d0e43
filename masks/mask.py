"""A mask: what a tier does with each sublayer of the model (the paper's z, section 2.2, with precisions besides)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, get_args

from via_sd.errors import MaskError

#: Of the mask file.
FORMAT = "via-sd-mask"
VERSION = 2

#: Weight-only quantisation a tier can run a sublayer in.
QuantisedState = Literal["int8", "int4"]
#: What a tier does with a sublayer: run it as full does, leave it out, leave it out together with its neighbours in
#: the same state and put one linear map in the place of them all, or run it on quantised weights.
SublayerState = Literal["keep", "skip", "bridge", "int8", "int4"]
#: What a tier does with the LM head.
HeadState = Literal["keep", "int8", "int4"]

SUBLAYER_STATES: tuple[SublayerState, ...] = get_args(SublayerState)
HEAD_STATES: tuple[HeadState, ...] = get_args(HeadState)
QUANTISED_STATES: tuple[QuantisedState, ...] = get_args(QuantisedState)
#: States in which a sublayer does not run: an attention sublayer then leaves no KV.
_LEFT_OUT = ("skip", "bridge")


@dataclass(frozen=True)
class ModelIdentity:
    """What makes a mask belong to a model.

    `fingerprint` is a hash over the model's normalisation weights, which training changes and quantisation does not:
    a mask stays valid for another precision of the same checkpoint and is refused for another checkpoint of the same
    shape.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    fingerprint: str

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelIdentity:
        """Read the `model` object of a mask file or a bundle manifest; raises `MaskError` if a field is wrong."""
        for key, example in asdict(_EXAMPLE).items():
            value = data.get(key)
            if type(value) is not type(example) or (isinstance(value, int) and value < 1):
                wanted = "a text" if isinstance(example, str) else "a whole number, 1 or more"
                raise MaskError(f"the model identity's {key} is {brief(value)}, wanted {wanted}")
        return cls(**{key: data[key] for key in asdict(_EXAMPLE)})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_EXAMPLE = ModelIdentity("llama", 1, 1, 1, "")


@dataclass(frozen=True)
class Mask:
    """A mask z: what a tier does with each sublayer and with the LM head.

    Attributes:
        attention: state of each layer's attention sublayer.
        mlp: state of each layer's MLP sublayer.
        head: state of the LM head.
        name: what tiers and files made from it are called.
        model: the model it was made for, `None` if the file did not say.
        search: how it was found (seed, cost, calibration text, …), free-form.

    Raises:
        MaskError: a state that does not exist, attention and MLP of different length, or no sublayer that runs.
    """

    attention: tuple[SublayerState, ...]
    mlp: tuple[SublayerState, ...]
    head: HeadState = "keep"
    name: str = "slim"
    model: ModelIdentity | None = None
    search: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if len(self.attention) != len(self.mlp):
            raise MaskError(
                f"the mask has {len(self.attention)} states of attention and {len(self.mlp)} of MLPs; "
                "it wants one of each per layer"
            )
        for part, states, allowed in (
            ("attention", self.attention, SUBLAYER_STATES),
            ("mlp", self.mlp, SUBLAYER_STATES),
            ("head", (self.head,), HEAD_STATES),
        ):
            unknown = sorted({str(state) for state in states if state not in allowed})
            if unknown:
                raise MaskError(f"{part} holds {', '.join(map(repr, unknown))}; its states are {', '.join(allowed)}")
        if not any(self.sublayers):
            raise MaskError("the mask keeps nothing: a slim-verifier needs at least one sublayer")

    @classmethod
    def from_flags(cls, keep_attention: Sequence[bool], keep_mlp: Sequence[bool], **fields: Any) -> Mask:
        """A mask that keeps or skips each sublayer: one flag per layer for its attention and one for its MLP."""
        return cls(_from_flags(keep_attention), _from_flags(keep_mlp), **fields)

    @classmethod
    def from_layers(cls, keep: Sequence[bool], **fields: Any) -> Mask:
        """A mask of whole layers: attention and MLP kept or skipped together."""
        return cls.from_flags(keep, keep, **fields)

    @classmethod
    def from_states(cls, states: Sequence[SublayerState], **fields: Any) -> Mask:
        """A mask from states in the order of execution, as `states` gives them."""
        return cls(tuple(states[0::2]), tuple(states[1::2]), **fields)

    def in_precision(self, precision: QuantisedState) -> Mask:
        """The same mask with everything it keeps, the LM head included, in `precision`."""
        return self._replaced({"keep": precision})

    def keeping(self, *precisions: str) -> Mask:
        """The same mask with everything that is in one of `precisions`, the LM head included, kept as full has it."""
        return self._replaced(dict.fromkeys(precisions, "keep"))

    def without_bridges(self) -> Mask:
        """The same mask with nothing in the place of what its bridges replace."""
        return self._replaced({"bridge": "skip"})

    def _replaced(self, states: Mapping[str, Any]) -> Mask:
        attention, mlp = (tuple(states.get(state, state) for state in part) for part in (self.attention, self.mlp))
        return replace(self, attention=attention, mlp=mlp, head=states.get(self.head, self.head))

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def states(self) -> tuple[SublayerState, ...]:
        """States in the order of execution: attention 0, MLP 0, attention 1, …; length 2 * num_layers."""
        return tuple(state for pair in zip(self.attention, self.mlp, strict=True) for state in pair)

    @property
    def sublayers(self) -> tuple[bool, ...]:
        """Whether each sublayer runs, in whatever precision, in the order of execution."""
        return tuple(state not in _LEFT_OUT for state in self.states)

    @property
    def keep_attention(self) -> tuple[bool, ...]:
        """Whether each layer's attention runs, in whatever precision, and so writes its KV."""
        return self.sublayers[0::2]

    @property
    def keep_mlp(self) -> tuple[bool, ...]:
        """Whether each layer's MLP runs, in whatever precision."""
        return self.sublayers[1::2]

    @property
    def keeps_all(self) -> bool:
        """Whether it does everything as full does."""
        return {*self.states, self.head} == {"keep"}

    @property
    def precisions(self) -> tuple[QuantisedState, ...]:
        """The precisions that some sublayer, or the LM head, is in besides that of full."""
        return tuple(state for state in QUANTISED_STATES if state in (*self.states, self.head))

    @property
    def skip_ratio(self) -> float:
        """Share of the sublayers that does not run, 0 to 1."""
        flags = self.sublayers
        return flags.count(False) / len(flags)

    @property
    def bridges(self) -> tuple[range, ...]:
        """The runs of neighbouring sublayers that one linear map each replaces, in the order of execution."""
        found, start = [], 0
        for state, run in groupby(self.states):
            stop = start + len(list(run))
            if state == "bridge":
                found.append(range(start, stop))
            start = stop
        return tuple(found)

    def is_within(self, outer: Mask) -> bool:
        """Whether every attention sublayer that runs here runs under `outer` too, in whatever precision.

        Tiers share KV buffers, so a lower tier may only read what the tier above it writes.
        """
        return all(o or not i for i, o in zip(self.keep_attention, outer.keep_attention, strict=True))

    def check_model(self, model: ModelIdentity) -> None:
        """Raise `MaskError` unless the mask has the model's length and, if it names a model, names this one."""
        if self.num_layers != model.num_layers:
            raise MaskError(
                f"mask '{self.name}' is for {self.num_layers} layers, the model ({model.model_type}) has "
                f"{model.num_layers}; use a mask made for this model"
            )
        if self.model is not None and self.model != model:
            differing = [k for k, v in self.model.to_json().items() if v != model.to_json()[k]]
            raise MaskError(
                f"mask '{self.name}' was made for another model: "
                + ", ".join(f"{k} is {self.model.to_json()[k]!r}, wanted {model.to_json()[k]!r}" for k in differing)
                + '; search a mask for this model, or delete the file\'s "model" entry to use it all the same'
            )

    def to_json(self) -> dict[str, Any]:
        """The mask as its file has it."""
        data: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "attention": list(self.attention),
            "mlp": list(self.mlp),
            "head": self.head,
        }
        if self.model is not None:
            data["model"] = self.model.to_json()
        if self.search:
            data["search"] = dict(self.search)
        return data


def brief(value: Any) -> str:
    """`value` as JSON, cut to what fits in a message."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _from_flags(keep: Sequence[bool]) -> tuple[SublayerState, ...]:
    return tuple("keep" if flag else "skip" for flag in keep)
