"""`via-sd-export generate`: bundle + prompt -> text, each token coloured by the tier it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from via_sd.runtime import GenerationConfig
from via_sd.runtime.engines.backends import ONNXRUNTIME
from via_sd.tools.commands.console import command, err, out, print_json
from via_sd.tools.commands.options import AsJson, Backend, PolicyFile, Threads, TrustEngines, load_pipeline
from via_sd.tools.commands.tier_text import show, summary


@command
def generate(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.")],
    prompt: Annotated[str, typer.Option(help="Prompt; goes through the model's chat template unless --raw.")],
    mode: Annotated[
        str, typer.Option(help="plain, speculative, cascade (exact), routed (approximate), or auto.")
    ] = "auto",
    max_new_tokens: Annotated[int, typer.Option(help="Length limit of the answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the K likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens that reach this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens at least this share as likely as the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 makes tokens that occurred less likely.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same output.", show_default="drawn")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the text; repeat for more.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence tokens.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the chat template.")] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: each token's log-probability and this many alternatives.")
    ] = None,
    gamma: Annotated[int | None, typer.Option(help="Length of drafted blocks.", show_default="adaptive")] = None,
    alpha1: Annotated[
        float | None, typer.Option(help="Router: how far below slim's best a draft token may be.", show_default="0.5")
    ] = None,
    alpha2: Annotated[
        float | None, typer.Option(help="Router: how unsure slim may be before full is asked.", show_default="0.3")
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            help="Routed: `paper` asks slim first every round, `adaptive` where that pays; `calibrated` too, by what "
            "`calibrate` found instead of thresholds.",
            show_default="adaptive",
        ),
    ] = None,
    max_lag: Annotated[int, typer.Option(help="Most emitted tokens that the full verifier has not checked yet.")] = 64,
    max_divergence: Annotated[
        float | None,
        typer.Option(
            help="Routed: tighten the router above this share of differing tokens.",
            show_default="none; calibrate's with --router calibrated",
        ),
    ] = None,
    threads: Threads = None,
    backend: Backend = ONNXRUNTIME,
    trust_engines: TrustEngines = False,
    policy: PolicyFile = None,
    as_json: AsJson = False,
) -> None:
    """Generate text from BUNDLE."""
    config = GenerationConfig(
        mode=mode,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        raw=raw,
        logprobs=logprobs,
        gamma=gamma,
        alpha1=alpha1,
        alpha2=alpha2,
        router=router,
        max_lag=max_lag,
        max_divergence=max_divergence,
    )
    pipeline = load_pipeline(bundle, backend=backend, threads=threads, trust_engines=trust_engines, policy=policy)
    if as_json:
        print_json(pipeline.generate(prompt, config).to_json(), ensure_ascii=False)
        return
    stream = pipeline.stream(prompt, config)
    try:
        for chunk in stream:
            show(chunk)
    finally:  # whatever ends the text, what is said next begins a line
        out.print()
    err.print(summary(stream.completion), highlight=False)
    done = stream.completion
    if done.stats.mode == "routed" and done.stats.slim_calls == 0:
        resolved = pipeline.resolve(config)
        shut = pipeline.router(resolved).shut
        reason = f"nothing was calibrated for a divergence of {resolved.max_divergence:g}" if shut else "it did not pay"
        err.print(f"slim was never asked: {reason}", highlight=False)
    if done.finish_reason == "length" and len(done.token_ids) < max_new_tokens:
        full = f"{pipeline.capacity} tokens, {done.prompt_tokens} of them the prompt's"
        err.print(f"the KV buffers are full ({full}): export with a larger --max-seq-len", highlight=False)
