"""Calibrate a bundle: time its forward passes, run the candidates for `auto`, and keep what was chosen as a policy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from via_sd.files import write_whole
from via_sd.progress import Progress, no_progress
from via_sd.runtime import Bundle, Pipeline, load_bundle
from via_sd.runtime.engines.backends import ONNXRUNTIME, open_engines
from via_sd.runtime.generation.machine import Machine, this_machine
from via_sd.runtime.generation.policy import Policy
from via_sd.runtime.generation.policy_file import policy_file, policy_json
from via_sd.tools.bench import PLAIN, Prompt
from via_sd.tools.bench.forecast import Predicted, forecast_settings
from via_sd.tools.calibration.rounds import (
    Rounds,
    candidates,
    is_exact,
    pipeline_by,
    policy_of,
    run_rounds,
    slim_verdict,
    winner_of,
)
from via_sd.tools.prediction import Costs, Predictor, SyntheticTier, measure_costs, record_texts
from via_sd.tools.prediction.replay import Trace


@dataclass(frozen=True)
class Calibration:
    """What a calibration measured, and what follows from it.

    Attributes:
        bundle, machine: what was measured, and where.
        costs: latency of the forward passes.
        tried: label -> options of everything `auto` could have been, see `candidates`.
        predicted: label -> bucket -> `tokens_per_s` and `over_plain` that step costs and texts let expect; those of a
            synthetic tier are there, too, and are never run. None where a rule of the model's own cannot be replayed.
        rounds: figures of the runs.
        policy: what `auto` is to do.
        request: what was asked for: `prompts` (their number), `max_new_tokens`.
        max_divergence: the limit that was asked for.
    """

    bundle: Bundle
    machine: Machine
    costs: Costs
    tried: Mapping[str, Mapping[str, Any]]
    predicted: Predicted | None
    rounds: Rounds
    policy: Policy
    request: Mapping[str, int]
    max_divergence: float | None

    @property
    def winner(self) -> str:
        """Label of what `auto` is to do."""
        return winner_of(self.rounds.second, self.max_divergence)

    @property
    def approximate(self) -> list[str]:
        """Labels of the candidates that are not exact."""
        return [label for label, options in self.tried.items() if not is_exact(options)]

    @property
    def verdict(self) -> str:
        """Whether the slim tier pays, in words."""
        return slim_verdict(self.tried, self.rounds.second, self.max_divergence)

    @property
    def file(self) -> Path:
        """Where a pipeline over the bundle looks for this machine's policy."""
        return policy_file(self.bundle, self.machine)

    def to_json(self) -> dict[str, Any]:
        """Contents of the policy's file: the policy, and what was measured for people to read."""
        measured = {
            **self.request,
            "step_ms": self.costs.step_ms,
            "predicted": self.predicted,
            "first_round": self.rounds.first,
            "second_round": self.rounds.second,
        }
        return policy_json(self.bundle, self.machine, self.policy, measured)

    def write(self, file: Path | None = None) -> Path:
        """Write the policy to `file`, into the bundle if None; the file that was written."""
        file = file or self.file
        file.parent.mkdir(exist_ok=True)
        write_whole(file, json.dumps(self.to_json(), indent=1) + "\n")
        return file


def calibrate(
    bundle: Bundle | str | Path,
    prompts: Sequence[Prompt],
    *,
    max_divergence: float | None = None,
    max_new_tokens: int = 128,
    repeats: int = 2,
    synthetic: SyntheticTier | None = None,
    backend: str = ONNXRUNTIME,
    device: str | None = None,
    threads: int | None = None,
    trust_engines: bool = False,
    progress: Progress = no_progress,
) -> Calibration:
    """Measure a bundle on this machine and `prompts`, and choose what `auto` is to do there.

    Args:
        max_divergence: try `routed` too, where no more than this share of tokens (0 to 1) differs from the full
            verifier's; only exact modes if None or 0.
        max_new_tokens: length of every answer, 2 or more.
        repeats: times every prompt is generated in the second round.
        synthetic: a slim-verifier or drafter that is not there, to predict the speed with it.
        backend, device, threads, trust_engines: see `open_engines`.

    Raises:
        BundleError: a bundle that cannot be read, or a backend that cannot run it.
        RequestError: a prompt that leaves too little room for its answer.
    """
    loaded = bundle if isinstance(bundle, Bundle) else load_bundle(bundle)
    progress("loading", None)
    verifier, drafter = open_engines(loaded, backend, device=device, threads=threads, trust_engines=trust_engines)
    progress("timing passes", None)
    costs = measure_costs(loaded, verifier, drafter)
    tried = candidates(loaded, max_divergence)
    pipeline = pipeline_by(costs, loaded, verifier, drafter)
    traces = _traces(pipeline, prompts, max_new_tokens, progress)
    rounds = run_rounds(
        pipeline,
        prompts,
        tried,
        max_divergence=max_divergence,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        progress=progress,
    )
    predictor = Predictor(loaded, verifier, drafter, traces, costs, pipeline.policy)
    return Calibration(
        loaded,
        this_machine(backend, threads),
        costs,
        tried,
        forecast_settings(predictor, {label: tried[label] for label in rounds.second}, prompts, synthetic),
        rounds,
        policy_of(tried, rounds, max_divergence, costs),
        {"prompts": len(prompts), "max_new_tokens": max_new_tokens},
        max_divergence,
    )


def _traces(pipeline: Pipeline, prompts: Sequence[Prompt], max_new_tokens: int, progress: Progress) -> list[Trace]:
    """What every tier says along the texts that plain decoding writes."""
    texts = []
    for number, prompt in enumerate(prompts):
        progress(f"recording prompt {number + 1} of {len(prompts)}", number / len(prompts))
        completion = pipeline.generate(prompt.text, mode=PLAIN, max_new_tokens=max_new_tokens, ignore_eos=True)
        texts.append(completion.token_ids)
    return record_texts(pipeline, [prompt.text for prompt in prompts], texts)
