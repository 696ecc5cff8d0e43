"""Bundle -> text: loads a bundle once and serves any number of sequences from it, from any number of threads."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, overload

from tokenizers import Tokenizer

from via_sd.contract.generation_options import GenerationConfig
from via_sd.contract.graphs import DRAFTER, FULL, VERIFIER
from via_sd.contract.manifest import TOKENIZER_FILE, Bundle, load_bundle
from via_sd.errors import BundleError, RequestError
from via_sd.runtime.batching.batch import PassTotals
from via_sd.runtime.batching.member import Member
from via_sd.runtime.batching.shared import SharedBatch
from via_sd.runtime.decoding.default_costs import PRECISIONS
from via_sd.runtime.decoding.logits_processors import CustomProcessor
from via_sd.runtime.decoding.router import Router
from via_sd.runtime.decoding.tiered_model import TieredModel
from via_sd.runtime.engines.backends import ONNXRUNTIME, open_engines
from via_sd.runtime.engines.loaded_files import LoadedFiles
from via_sd.runtime.engines.protocol import Engine
from via_sd.runtime.generation.completion import Completion
from via_sd.runtime.generation.control import TokenControl
from via_sd.runtime.generation.output import Output
from via_sd.runtime.generation.policy import Policy
from via_sd.runtime.generation.policy_file import find_policy, read_policy
from via_sd.runtime.generation.prompts import PROMPT_OPTIONS, Prompt, PromptEncoder, PromptOptions, are_several
from via_sd.runtime.generation.resolve import costs_of, resolve, router_for
from via_sd.runtime.generation.scoring import Score, score_tokens
from via_sd.runtime.generation.stream import CompletionStream, finish_all
from via_sd.runtime.generation.text import Detokenizer, encode_text


class Pipeline:
    """A loaded bundle.

    Thread-safe: every sequence runs in a KV slot of its own, and gives the same output as it would alone. Sequences
    that are decoded at the same time share forward passes.
    """

    #: What decodes.
    model_class = TieredModel

    def __init__(
        self,
        bundle: Bundle,
        verifier: Engine,
        drafter: Engine | None,
        *,
        max_sequences: int,
        retained_slots: int,
        slot_timeout: float | None,
        policy: Policy | None = None,
    ) -> None:
        self.bundle, self.policy = bundle, policy
        mapped = (bundle.manifest[model].get("weights") for model in (VERIFIER, DRAFTER))
        self._files = LoadedFiles(bundle.file(name) for name in mapped if name in bundle.manifest["files"])
        self.tokenizer = _load_tokenizer(bundle)
        self.detokenize = Detokenizer(self.tokenizer)
        self.eos_token_ids = frozenset(int(token) for token in bundle.manifest["tokenizer"]["eos_token_ids"])
        self._control = TokenControl(
            self.tokenizer, self.eos_token_ids, bundle.manifest.get("generation_config", {}), verifier.vocab_size
        )
        self._prompts = PromptEncoder(
            self.tokenizer,
            partial(_load_tokenizer, bundle),
            bundle.manifest["tokenizer"],
            verifier.vocab_size,
            verifier.max_seq_len,
        )
        self._batch = SharedBatch()
        self.model = self.model_class(
            verifier,
            drafter,
            bundle.manifest["drafter"],
            bundle.slim,
            costs_of(bundle, policy),
            max_sequences=max_sequences,
            retained_slots=retained_slots,
            slot_timeout=slot_timeout,
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        backend: str = ONNXRUNTIME,
        device: str | None = None,
        threads: int | None = None,
        max_sequences: int = 8,
        retained_slots: int = 2,
        slot_timeout: float | None = None,
        deterministic: bool = False,
        verify: bool = True,
        trust_engines: bool = False,
        policy: str | Path | bool = True,
    ) -> Pipeline:
        """Load the bundle at `path`.

        Args:
            backend: what runs it, one of `BACKENDS`.
            device: `cpu`, `cuda` or `cuda:N`; see `open_engines`. What was asked for, or what an installation for GPUs
                implies, is what runs: there is no fallback to the CPU.
            threads: threads of one pass; the number of physical cores if None.
            max_sequences: sequences that may run at once; more wait for a slot.
            retained_slots: KV buffers kept when idle, so that a prompt that begins like a finished one skips that
                much prefill.
            slot_timeout: seconds a request waits for a slot before `BusyError`; None waits for as long as it takes.
            deterministic: give every text bit for bit, whatever its mode and whatever runs beside it: no kernel is used
                whose roundings depend on the number of tokens in a pass.
            verify: compare the hash of every file with the manifest.
            trust_engines: run TensorRT engines that were not built on this machine.
            policy: take what `calibrate` left in the bundle for this machine, backend and number of threads, if it was
                run; or the file it wrote elsewhere; or nothing (False).

        Raises:
            BundleError: no bundle or policy, a damaged one, or no engine installed to run it.
        """
        bundle = load_bundle(path, verify=verify)
        if bundle.precision not in PRECISIONS:
            raise BundleError(
                f"{bundle.path} has weights in {bundle.precision}, this runtime takes {', '.join(PRECISIONS)}; "
                "export the bundle again in one of these"
            )
        found = None
        if policy is True:
            found = find_policy(bundle, backend, threads)
        elif policy:
            found = read_policy(Path(policy), bundle, backend)
        engine, drafter = open_engines(
            bundle,
            backend,
            device=device,
            threads=threads,
            slots=max_sequences + retained_slots,
            deterministic=deterministic,
            trust_engines=trust_engines,
            verify=verify,
        )
        return cls(
            bundle,
            engine,
            drafter,
            max_sequences=max_sequences,
            retained_slots=retained_slots,
            slot_timeout=slot_timeout,
            policy=found,
        )

    # -- prompts -----------------------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt, options: PromptOptions | None = None, **given: Any) -> list[int]:
        """Token ids of a prompt: a text or a conversation, through the chat template unless `raw`, or ids as they are.

        Args:
            given: fields of `PromptOptions` by name, instead of `options` or on top of it.

        Raises:
            RequestError: an empty prompt, one of another type, options that do not fit it, or one that leaves no room
                for a token in the KV buffers.
        """
        return self._prompts.encode(prompt, replace(options or PromptOptions(), **given))

    @property
    def has_chat_template(self) -> bool:
        """Whether texts and conversations go through a chat template of the model's own."""
        return self._prompts.has_chat_template

    @property
    def passes(self) -> PassTotals:
        """Forward passes of decoding so far, the sequences and tokens in them, and the seconds they took."""
        return self._batch.batch.totals

    # -- generation --------------------------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        cancel: threading.Event | None = None,
        logits_processors: Sequence[CustomProcessor] = (),
        **options: Any,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        cancel: threading.Event | None = None,
        logits_processors: Sequence[CustomProcessor] = (),
        **options: Any,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Any,
        config: Any = None,
        *,
        cancel: threading.Event | None = None,
        **options: Any,
    ) -> Completion | list[Completion]:
        """Generate to the end; see `stream`.

        Args:
            prompt: one prompt, or a list of them, which are decoded together and whose completions come in their order.
            config: what is asked for, of a list of prompts a list of as many if they differ.
            options: fields of `GenerationConfig` by name: `mode`, `max_new_tokens`, `temperature`, `seed`, `stop`, …;
                and of `PromptOptions`: `tools`, `chat_template_kwargs`, `continue_final_message`, …
        """
        if not are_several(prompt):
            stream = self.stream(prompt, config, cancel=cancel, **options)
            for _ in stream:
                pass
            return stream.completion
        configs = [config] * len(prompt) if config is None or isinstance(config, GenerationConfig) else list(config)
        if len(configs) != len(prompt):
            raise RequestError(f"{len(configs)} configs for {len(prompt)} prompts; give one, or one for each")
        cancel = cancel or threading.Event()
        streams = [
            self.stream(each, wanted, cancel=cancel, **options) for each, wanted in zip(prompt, configs, strict=True)
        ]
        return finish_all(streams)

    def stream(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        cancel: threading.Event | None = None,
        logits_processors: Sequence[CustomProcessor] = (),
        **options: Any,
    ) -> CompletionStream:
        """Generate a chunk per round; the stream's `completion` is there when it has ended.

        While a long prompt is read, chunks without tokens come too, one for every `Engine.prefill_chunk` tokens.

        Args:
            prompt: a text, messages ({"role": …, "content": …}), or token ids.
            config: what is asked for; `options` are its fields by name, instead of it or on top of it, and those of
                `PromptOptions`.
            cancel: set from any thread to end after the round, or the chunk of the prompt, that is running.
            logits_processors: functions of your own, (tokens so far, logits float32 [vocab]) -> logits, which apply to
                every tier. Exact modes stay exact if a function depends on its arguments alone.

        Raises:
            RequestError: bad options or prompt, or a mode this bundle lacks a tier for.
            BusyError: no KV slot came free in time.
            BundleError: somebody has written into the weights since it was loaded.
        """
        known = vars(config or GenerationConfig())
        reading = {name: options.pop(name) for name in PROMPT_OPTIONS if name in options and name not in known}
        if unknown := sorted(set(options) - set(known)):
            names = ", ".join(dict.fromkeys((*known, *PROMPT_OPTIONS)))
            raise RequestError(f"no option is called {', '.join(unknown)}; options are {names}")
        self._files.check()
        wanted = GenerationConfig(**{**known, **options})
        tokens, config = self.encode(prompt, raw=wanted.raw, **reading), self.resolve(wanted)
        output = Output(self.detokenize, self.eos_token_ids, config, tokens)
        processors = self._control.processors(config, len(tokens), logits_processors)
        router, cancel = self.router(config), cancel or threading.Event()
        return CompletionStream(self.model, self._batch, tokens, config, router, output, cancel, processors)

    def generate_n(
        self, prompt: Prompt, n: int, config: GenerationConfig | None = None, **options: Any
    ) -> list[Completion]:
        """`n` answers to one prompt, which is read once: from the second on, its KV is there (see `retained_slots`).

        Args:
            options: as for `generate`. Answer i has the seed `seed + i`; greedy answers are all the same.

        Raises:
            RequestError: `n` is less than 1, and what `stream` raises.
        """
        if n < 1:
            raise RequestError(f"n is {n}, wanted 1 or more")
        seed = options.pop("seed", config.seed if config else None)
        first = secrets.randbits(63) if seed is None else int(seed)
        return [self.generate(prompt, config, seed=(first + i) % 2**64, **options) for i in range(n)]

    def score(self, text: str | Sequence[int], *, context: str | Sequence[int] = (), tier: str = FULL) -> Score:
        """Log-probabilities of `text` after `context` under one tier; nothing is generated.

        Args:
            text: a text, taken as it is, or token ids. Without a context its first token is not scored.
            context: what precedes it: a text, with the special tokens that the tokenizer puts in front, or token ids.
            tier: `full`, or the name of another tier of the bundle, such as its slim-verifier's.

        Raises:
            RequestError: no such tier, nothing to score, or more tokens than the KV buffers hold.
        """
        if tier not in self.verifier.tiers:
            raise RequestError(f"tier {tier!r} is not known; this bundle's are {', '.join(self.verifier.tiers)}")
        before = self.encode(context, raw=True) if context else []
        if isinstance(text, str):
            ids = encode_text(self.tokenizer, text, "the text") if before else self.encode(text, raw=True)
        else:
            ids = list(text)
        tokens, start = [*before, *ids], max(1, len(before))
        if len(tokens) <= start:
            raise RequestError(f"{len(tokens)} tokens leave nothing to score; give one that follows another")
        if len(tokens) > self.capacity + 1:
            raise RequestError(
                f"{len(tokens)} tokens are too many to score at once, wanted {self.capacity + 1} or fewer"
            )
        for token in tokens:
            if not 0 <= token < self.verifier.vocab_size:
                raise RequestError(f"token {token} is not one of this model's, 0 to {self.verifier.vocab_size - 1}")
        member = Member(score_tokens(self.verifier, tier, tokens, start))
        member.advance()
        self._batch.join(member)
        with suppress(StopIteration):
            self._batch.take(member)
        score: Score = member.outcome
        return score

    def resolve(self, config: GenerationConfig) -> GenerationConfig:
        """`config` with the mode that `auto` means here, and what goes with that where `config` is silent.

        Raises:
            RequestError: a mode or router that this bundle or its policy lacks something for.
        """
        return resolve(self._control.resolve(config), self.policy, has_slim=self.bundle.slim is not None)

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """What the model's publisher recommends for sampling; `generate(prompt, **pipeline.sampling_defaults)`."""
        return self._control.sampling

    def router(self, config: GenerationConfig) -> Router:
        """The router for a resolved `config`."""
        return router_for(config, self.policy)

    # -- what lies beneath ---------------------------------------------------------------------------------------------

    @property
    def verifier(self) -> Engine:
        """The engine of the verifier's tiers."""
        return self.model.verifier

    @property
    def drafter(self) -> Engine | None:
        """The engine of a model drafter."""
        return self.model.drafter

    @property
    def capacity(self) -> int:
        """Tokens that a sequence, prompt and answer, may have."""
        return self.model.capacity


def _load_tokenizer(bundle: Bundle) -> Tokenizer:
    file = bundle.file(TOKENIZER_FILE)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - plain Exception, and panics of Rust, which are no Exception
        raise BundleError(f"{file} cannot be read: {error}; export the bundle again") from None
    # Left over from training in many a file; a prompt is neither cut in silence nor filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
