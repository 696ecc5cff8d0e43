"""`via-sd-export generate`: bundle + prompt -> text, each token coloured by the tier it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from via_sd.contract.generation_options import OPTIONS
from via_sd.contract.mode_names import ROUTED
from via_sd.runtime import Completion, GenerationConfig
from via_sd.tools.commands.console import CommandError, command, err, out, print_json
from via_sd.tools.commands.generation_options import with_generation_options
from via_sd.tools.commands.options import AsJson, PipelineOptions, with_pipeline_options
from via_sd.tools.commands.prompt_options import GivenPrompt, with_prompt_options
from via_sd.tools.commands.tier_text import show, summary


@command
@with_prompt_options
@with_generation_options
@with_pipeline_options
def generate(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.")],
    given: GivenPrompt,
    config: GenerationConfig,
    runtime: PipelineOptions,
    n: Annotated[int, typer.Option("--n", help="Answers to the prompt, which is read once.", min=1)] = 1,
    sampling_defaults: Annotated[
        bool, typer.Option("--sampling-defaults", help="Sample as the model's publisher recommends, where not told.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Generate text from BUNDLE."""
    pipeline = runtime.load(bundle)
    if sampling_defaults:
        config = _with_sampling(config, pipeline.sampling_defaults)
    if n > 1:
        _print_several(pipeline.generate_n(given.prompt, n, config, **given.options), as_json=as_json)
        return
    if as_json:
        print_json(pipeline.generate(given.prompt, config, **given.options).to_json(), ensure_ascii=False)
        return
    stream = pipeline.stream(given.prompt, config, **given.options)
    try:
        for chunk in stream:
            show(chunk.pieces)
    finally:  # whatever ends the text, what is said next begins a line
        out.print()
    err.print(summary(stream.completion), highlight=False)
    done = stream.completion
    if done.stats.mode == ROUTED and done.stats.slim_calls == 0:
        resolved = pipeline.resolve(config)
        shut = pipeline.router(resolved).shut
        reason = f"nothing was calibrated for a divergence of {resolved.max_divergence:g}" if shut else "it did not pay"
        err.print(f"slim was never asked: {reason}", highlight=False)
    if done.finish_reason == "length" and len(done.token_ids) < config.max_new_tokens:
        full = f"{pipeline.capacity} tokens, {done.prompt_tokens} of them the prompt's"
        err.print(f"the KV buffers are full ({full}): export with a larger --max-seq-len", highlight=False)


def _with_sampling(config: GenerationConfig, recommended: Mapping[str, Any]) -> GenerationConfig:
    """`config` with the recommended settings where it has the default."""
    if not recommended:
        raise CommandError("--sampling-defaults: this model's generation_config.json recommends none; leave it out")
    return replace(config, **{k: v for k, v in recommended.items() if getattr(config, k) == OPTIONS[k].default})


def _print_several(found: Sequence[Completion], *, as_json: bool) -> None:
    if as_json:
        print_json({"completions": [each.to_json() for each in found]}, ensure_ascii=False)
        return
    for number, each in enumerate(found, 1):
        err.print(f"-- answer {number}, seed {each.seed}", highlight=False)
        show(each.pieces)
        out.print()
        err.print(summary(each), highlight=False)
