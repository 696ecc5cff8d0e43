"""What a request can ask for."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from via_sd.errors import RequestError
from via_sd.runtime.decoding.modes import MODES
from via_sd.runtime.decoding.router import DivergenceGuard, Gates
from via_sd.runtime.decoding.sampling import SamplingParams

AUTO = "auto"
CALIBRATED = "calibrated"
DEFAULT_MAX_NEW_TOKENS = 256
ROUTERS = ("paper", "adaptive", CALIBRATED)
_WHOLE = ("max_new_tokens", "top_k", "seed", "logprobs", "gamma", "max_lag")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "alpha1", "alpha2", "max_divergence")


@dataclass(frozen=True)
class GenerationConfig:
    """Everything a request can ask for.

    Attributes:
        mode: `plain`, `speculative`, `cascade` (exact), `routed` (approximate), or `auto`: what calibration found best
            on this machine, `speculative` where it was not asked.
        max_new_tokens: length limit of the answer, in tokens.
        temperature, top_k, top_p, min_p, repetition_penalty: see `SamplingParams`.
        seed: keys the random stream; drawn and reported if None.
        stop: strings that end the text, or one of them; they are not part of it.
        ignore_eos: go on after end-of-sequence tokens.
        raw: take the prompt as it is, without the chat template.
        logprobs: report each token's log-probability and that many likeliest alternatives.
        gamma: length of drafted blocks; adaptive if None.
        alpha1, alpha2: the router's thresholds (see `Gates`); the policy's, or those of `Gates`, if None.
        router: `paper` asks slim first in every round (Algorithm 2 as it stands), `adaptive` only where that pays;
            `calibrated` does too, and goes by slim's margins as calibration found them on this machine instead of by
            thresholds. The policy's, or `adaptive`, if None.
        max_lag: most emitted tokens that the full verifier has not checked yet.
        max_divergence: share of tokens that may differ from the full verifier's choice before the router tightens;
            with `calibrated` the limit of the calibration, if None.
        audit_tail: let the full verifier judge what is left at the end, so that the divergence covers every token.
        keep_margins: keep `Completion.margins`.

    Raises:
        RequestError: a value outside its range.
    """

    mode: str = AUTO
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] | None = ()
    ignore_eos: bool = False
    raw: bool = False
    logprobs: int | None = None
    gamma: int | None = None
    alpha1: float | None = None
    alpha2: float | None = None
    router: str | None = None
    max_lag: int = 64
    max_divergence: float | None = None
    audit_tail: bool = False
    keep_margins: bool = False

    def __post_init__(self) -> None:
        if self.mode not in (AUTO, *MODES):
            raise RequestError(f"mode {self.mode!r} is not known; modes are {', '.join((AUTO, *MODES))}")
        if self.router is not None and self.router not in ROUTERS:
            raise RequestError(f"router {self.router!r} is not known; routers are {', '.join(ROUTERS)}")
        for kind, wanted, names in ((Integral, "a whole number", _WHOLE), (Real, "a number", _NUMBERS)):
            for name in names:
                value = getattr(self, name)
                may_be_open = getattr(type(self), name) is None  # its default
                if not isinstance(value, kind) and not (value is None and may_be_open):
                    raise RequestError(f"{name} is {value!r}, wanted {wanted}")
        for name, value, least in (
            ("max_new_tokens", self.max_new_tokens, 1),
            ("gamma", 1 if self.gamma is None else self.gamma, 1),
            ("max_lag", self.max_lag, 1),
            ("logprobs", 0 if self.logprobs is None else self.logprobs, 0),
        ):
            if value < least:
                raise RequestError(f"{name} is {value}, wanted {least} or more")
        stop: Any = self.stop or ()
        texts = (stop,) if isinstance(stop, str) or not isinstance(stop, Iterable) else tuple(stop)
        if not all(isinstance(text, str) for text in texts):
            raise RequestError(f"stop is {stop!r}, wanted strings")
        object.__setattr__(self, "stop", texts)
        if self.router == CALIBRATED and (self.alpha1, self.alpha2) != (None, None):
            raise RequestError(
                "alpha1 and alpha2 are thresholds of the routers paper and adaptive; the calibrated one takes "
                "max_divergence instead"
            )
        # Built once here so that a bad value is refused before anything runs.
        self.sampling()
        self.gates()
        DivergenceGuard(self.max_divergence)

    def gates(self) -> Gates:
        """The router's gates."""
        given = {"alpha1": self.alpha1, "alpha2": self.alpha2}
        return Gates(**{name: value for name, value in given.items() if value is not None})

    def sampling(self) -> SamplingParams:
        """The sampling part; a missing seed is drawn here."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
        )
