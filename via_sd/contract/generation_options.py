"""What a request can ask for: every option of a generation, declared here and nowhere else.

To add one: declare it below and implement it. Its check, `generate`'s option, `bench --set`, the Triton model's input
and default, and its documentation follow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from via_sd.contract.mode_names import AUTO, CALIBRATED, MODES, ROUTERS
from via_sd.contract.options import Option, Range, Served, declare, options_of
from via_sd.errors import RequestError

#: The paper's thresholds (Algorithm 2).
ALPHA1, ALPHA2 = 0.5, 0.3


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Everything a request can ask for.

    Raises:
        RequestError: a value of the wrong type or outside its range, or values that exclude each other.
    """

    mode: str = declare(
        AUTO,
        "Decoding mode: plain, speculative, cascade (exact), routed (approximate), or auto: what `calibrate` found "
        "fastest on this machine, speculative where it was not run.",
        choices=(AUTO, *MODES),
        served=Served.REQUEST,
    )
    max_new_tokens: int = declare(
        256, "Most tokens to generate.", range=Range(1), served=Served.REQUEST, triton_name="max_tokens"
    )
    temperature: float = declare(0.0, "0 is greedy.", range=Range(0, math.inf, below=True), served=Served.REQUEST)
    top_k: int = declare(
        0, "Sample from this many of the likeliest tokens; 0: from all.", range=Range(0), served=Served.REQUEST
    )
    top_p: float = declare(
        1.0,
        "Sample from the smallest set of the likeliest tokens that has at least this probability; 1: from all.",
        range=Range(0, 1, above=True),
        served=Served.REQUEST,
    )
    min_p: float = declare(
        0.0,
        "Leave out tokens with less than this share of the likeliest token's probability; 0: none.",
        range=Range(0, 1, below=True),
        served=Served.REQUEST,
    )
    repetition_penalty: float = declare(
        1.0,
        "Divide positive and multiply negative logits of tokens in prompt and output: above 1 makes them less likely.",
        range=Range(0.01, 100),
        served=Served.REQUEST,
    )
    seed: int | None = declare(
        None, "Random seed: the same seed gives the same output.", range=Range(0, 2**64 - 1), if_none="drawn",
        served=Served.REQUEST,
    )  # fmt: skip
    stop: Sequence[str] | None = declare((), "A string that ends the text and is not part of it; there may be several.")
    ignore_eos: bool = declare(False, "Go on after end-of-sequence tokens.", served=Served.REQUEST)
    raw: bool = declare(False, "Take the prompt as it is, without the chat template.")
    logprobs: int | None = declare(
        None, "Report each token's log-probability and this many alternatives (in `--json`).", range=Range(0)
    )
    gamma: int | None = declare(
        None, "Length of drafted blocks.", range=Range(1), if_none="adaptive", served=Served.OPERATOR
    )
    router: str | None = declare(
        None,
        "Routed: `paper` runs slim first in every round (Algorithm 2), `adaptive` only where that pays; `calibrated` "
        "too, and accepts by the margins that `calibrate` found instead of by thresholds.",
        choices=ROUTERS,
        if_none="adaptive",
        served=Served.OPERATOR,
    )
    alpha1: float | None = declare(
        None,
        "Router: accept a drafted token with at least 1 - alpha1 of the probability of slim's likeliest token.",
        range=Range(0, 1),
        if_none=str(ALPHA1),
        served=Served.OPERATOR,
    )
    alpha2: float | None = declare(
        None,
        "Router: run full where slim's likeliest token has a probability below 1 - alpha2.",
        range=Range(0, 1),
        if_none=str(ALPHA2),
        served=Served.OPERATOR,
    )
    max_lag: int = declare(
        64, "Most emitted tokens that the full verifier has not checked yet.", range=Range(1), served=Served.OPERATOR
    )
    max_divergence: float | None = declare(
        None,
        "Routed: tighten the router where more than this share of tokens differs from the full verifier's choice.",
        range=Range(0, 1),
        if_none="none; calibrate's with --router calibrated",
        served=Served.OPERATOR,
    )
    audit_tail: bool = declare(
        False,
        "Routed: end with a forward pass of the full verifier, so that the divergence covers every token.",
        command_line=False,
    )
    keep_margins: bool = declare(False, "Routed: keep `Completion.margins`.", command_line=False)

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            object.__setattr__(self, name, option.check(getattr(self, name)))
        if self.router == CALIBRATED and (self.alpha1, self.alpha2) != (None, None):
            raise RequestError(
                "alpha1 and alpha2 are thresholds of the routers paper and adaptive; the calibrated one takes "
                "max_divergence instead"
            )

    @property
    def greedy(self) -> bool:
        """Whether tokens are chosen rather than drawn."""
        return self.temperature == 0


#: The options of a generation by name.
OPTIONS: dict[str, Option] = options_of(GenerationConfig)
GenerationConfig.__doc__ = f"{GenerationConfig.__doc__}\n    Attributes:\n" + "".join(
    f"        {option.name}: {option.help}{f' None: {option.if_none}.' if option.if_none else ''}\n"
    for option in OPTIONS.values()
)
