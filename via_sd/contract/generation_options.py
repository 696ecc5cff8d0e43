"""What a request can ask for: every option of a generation, declared here and nowhere else.

To add one: declare it below and implement it. Its check, `generate`'s option, `bench --set`, the Triton model's input
and default, and its documentation follow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from via_sd.contract.mode_names import AUTO, CALIBRATED, EXACT_MODES, MODES, ROUTED, ROUTERS
from via_sd.contract.options import Option, Range, Served, declare, options_of
from via_sd.errors import RequestError

#: The paper's thresholds (Algorithm 2).
ALPHA1, ALPHA2 = 0.5, 0.3
#: Options that say what form an answer has.
GRAMMARS = ("json_schema", "regex", "grammar", "choices")
#: Options that say how a router decides, or what it is to tell: only `routed` has one.
ROUTING = ("router", "alpha1", "alpha2", "keep_margins")


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
    presence_penalty: float = declare(
        0.0, "Subtract this from the logits of generated tokens.", range=Range(-2, 2), served=Served.REQUEST
    )
    frequency_penalty: float = declare(
        0.0,
        "Subtract this from the logits of generated tokens for each time they occurred.",
        range=Range(-2, 2),
        served=Served.REQUEST,
    )
    logit_bias: Mapping[int, float] | None = declare(
        None, "Add to the logit of a token: ID=BIAS, -100 to 100; there may be several.", range=Range(-100, 100),
        if_none="none", served=Served.REQUEST,
    )  # fmt: skip
    suppress_tokens: Sequence[int] | None = declare(
        None, "Ids of tokens that are never generated.", range=Range(0), if_none="those of the model",
        served=Served.REQUEST,
    )  # fmt: skip
    bad_words: Sequence[str] | None = declare(
        None, "A text that is never generated; there may be several.", if_none="those of the model",
        served=Served.REQUEST,
    )  # fmt: skip
    no_repeat_ngram_size: int | None = declare(
        None,
        "Never generate a sequence of so many tokens that prompt or answer have already; 0: no limit.",
        range=Range(0),
        if_none="the model's, which is 0 for most",
        served=Served.REQUEST,
    )
    min_new_tokens: int | None = declare(
        None, "Tokens that do not end the text before so many were generated.", range=Range(0),
        if_none="the model's, which is 0 for most", served=Served.REQUEST, triton_name="min_tokens",
    )  # fmt: skip
    json_schema: str | Mapping[str, object] | None = declare(
        None, "JSON schema that the answer follows; `{}` for any JSON.", if_none="none", from_file=True
    )
    regex: str | None = declare(None, "Regular expression that the whole answer matches.", if_none="none")
    grammar: str | None = declare(
        None, "Grammar in Lark's or llama.cpp's form (GBNF) that the answer follows.", if_none="none",
        from_file=True,
    )  # fmt: skip
    choices: Sequence[str] | None = declare(
        None, "A text that the answer may be; there may be several.", if_none="any text", flag="choice"
    )
    seed: int | None = declare(
        None, "Random seed: the same seed gives the same output.", range=Range(0, 2**64 - 1), if_none="drawn",
        served=Served.REQUEST,
    )  # fmt: skip
    stop: Sequence[str] | None = declare((), "A string that ends the text and is not part of it; there may be several.")
    stop_token_ids: Sequence[int] = declare(
        (), "Ids of tokens that end the text.", range=Range(0), served=Served.REQUEST
    )
    skip_special_tokens: bool = declare(True, "Leave special tokens out of the text.")
    echo: bool = declare(False, "Begin the text with the prompt.")
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
        if isinstance(self.json_schema, Mapping):
            object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
        for name, option in OPTIONS.items():
            object.__setattr__(self, name, option.check(getattr(self, name)))
        grammars = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(grammars) > 1:
            raise RequestError(f"{' and '.join(grammars)} exclude each other; give one of them")
        if grammars and self.ignore_eos:
            raise RequestError(f"ignore_eos would go on behind the end of what {grammars[0]} allows; leave it out")
        if self.router == CALIBRATED and (self.alpha1, self.alpha2) != (None, None):
            raise RequestError(
                "alpha1 and alpha2 are thresholds of the routers paper and adaptive; the calibrated one takes "
                "max_divergence instead"
            )

    @property
    def greedy(self) -> bool:
        """Whether tokens are chosen rather than drawn."""
        return self.temperature == 0


def refuse_routing(config: GenerationConfig) -> None:
    """Refuse what a mode without a router cannot do.

    Raises:
        RequestError: `config` names an exact mode and sets an option of the router.
    """
    asked = [name for name in ROUTING if getattr(config, name) != OPTIONS[name].default]
    if asked and config.mode in EXACT_MODES:
        raise RequestError(
            f"{asked[0]} concerns the router, and mode {config.mode} has none; use mode {ROUTED}, or leave it out"
        )


def for_mode(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options`, meant for several modes, without those of the router where they name an exact one."""
    dropped = ROUTING if options.get("mode") in EXACT_MODES else ()
    return {name: value for name, value in options.items() if name not in dropped}


#: The options of a generation by name.
OPTIONS: dict[str, Option] = options_of(GenerationConfig)
GenerationConfig.__doc__ = f"{GenerationConfig.__doc__}\n    Attributes:\n" + "".join(
    f"        {option.name}: {option.help}{f' None: {option.if_none}.' if option.if_none else ''}\n"
    for option in OPTIONS.values()
)
