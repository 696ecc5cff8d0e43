"""An adapter to EleutherAI's lm-evaluation-harness, which loads it from here; needs the package `lm-eval`.

`lm_eval.simple_evaluate(model=BundleLM("bundle"), tasks=[…])`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from via_sd.contract.graphs import FULL
from via_sd.runtime import Pipeline


class BundleLM(TemplateLM):  # type: ignore[misc] # lm-eval's types are not read
    """A bundle as a model of the harness: log-likelihoods by one tier, answers by any mode.

    Args:
        bundle: a bundle directory, or a loaded pipeline.
        tier: scores texts.
        generation: options of answers, `mode` among them; the harness sets length, stop strings and temperature.
        load: arguments of `Pipeline.load`.
    """

    def __init__(
        self,
        bundle: str | Path | Pipeline,
        *,
        tier: str = FULL,
        generation: dict[str, Any] | None = None,
        **load: Any,
    ) -> None:
        super().__init__()
        self.pipeline = bundle if isinstance(bundle, Pipeline) else Pipeline.load(bundle, **load)
        self._tier, self._generation = tier, generation or {}

    @property
    def eot_token_id(self) -> int:
        """The end-of-sequence token."""
        found = self._special("eos_token")
        return min(self.pipeline.eos_token_ids) if found is None else found

    @property
    def prefix_token_id(self) -> int:
        """What stands in front of a text without context: BOS, or the end-of-sequence token of a model without one."""
        found = self._special("bos_token")
        return self.eot_token_id if found is None else found

    def _special(self, name: str) -> int | None:
        text = self.pipeline.bundle.manifest["tokenizer"]["special_tokens"].get(name)
        return None if text is None else self.pipeline.tokenizer.token_to_id(text)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds unless told otherwise."""
        tokens = self.pipeline.tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)
        return list(tokens.ids)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        found = []
        for _texts, context, continuation in requests:
            # What does not fit is cut off at the beginning, as the harness does itself.
            tokens = [*context, *continuation][-self.pipeline.capacity - 1 :]
            split = max(1, len(tokens) - len(continuation))
            score = self.pipeline.score(tokens[split:], context=tokens[:split], tier=self._tier)
            found.append((score.total, all(score.is_greedy)))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of what the buffers hold."""
        found: list[float] = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.pipeline.capacity,
                context_len=1,
            )
            pairs = [make_disjoint_window(window) for window in windows]
            scored = self._loglikelihood_tokens([(None, list(before), list(after)) for before, after in pairs])
            found.append(sum(float(total) for total, _ in scored))
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers to prompts, which are taken as they are."""
        found = []
        for request in requests:
            prompt, wanted = request.args
            until = wanted.get("until") or []
            options: dict[str, Any] = {
                "raw": True,
                "stop": [until] if isinstance(until, str) else until,
                "max_new_tokens": wanted.get("max_gen_toks", 256),
                "temperature": wanted.get("temperature", 0.0) if wanted.get("do_sample") else 0.0,
            }
            found.append(self.pipeline.generate(prompt, **{**options, **self._generation}).text)
        return found
