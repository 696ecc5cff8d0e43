"""Measure decoding modes against each other on this machine and the user's prompts.

    from via_sd import load
    from via_sd.tools.bench import read_prompts, run_bench, settings_of, summarise

    prompts = read_prompts("prompts.jsonl")
    samples = run_bench(load("bundle"), prompts, settings_of(["speculative", "routed"]), max_new_tokens=128, repeats=3)
    print(summarise(samples, prompts)["routed"]["all"]["over_plain"])

Failures are `PromptFileError` and `RequestError`. `comparison`, `prediction` and `Report` show the figures to people.
"""

from via_sd.tools.bench.prompts import Prompt, read_prompts
from via_sd.tools.bench.report import Report
from via_sd.tools.bench.run import PLAIN, Sample, run_bench, settings_of, summarise
from via_sd.tools.bench.tables import comparison, prediction

__all__ = [
    "PLAIN",
    "Prompt",
    "Report",
    "Sample",
    "comparison",
    "prediction",
    "read_prompts",
    "run_bench",
    "settings_of",
    "summarise",
]
