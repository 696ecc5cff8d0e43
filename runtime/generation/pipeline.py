"""Bundle -> text: loads a bundle once and serves any number of sequences from it, from any number of threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from via_sd.contract.generation_options import GenerationConfig
from via_sd.contract.graphs import FULL
from via_sd.contract.manifest import Bundle, load_bundle
from via_sd.contract.mode_names import AUTO, CALIBRATED, ROUTED, SLIM_MODES, SPECULATIVE
from via_sd.errors import BundleError, RequestError
from via_sd.runtime.decoding.block_length import StepCost
from via_sd.runtime.decoding.cache import SequenceCache, SlotPool
from via_sd.runtime.decoding.drafters import Drafter, ModelDrafter, NgramDrafter
from via_sd.runtime.decoding.router import Gates, Router
from via_sd.runtime.decoding.sampling import Processor
from via_sd.runtime.engines.backends import ONNXRUNTIME, open_engines
from via_sd.runtime.engines.protocol import Engine
from via_sd.runtime.generation.completion import Completion
from via_sd.runtime.generation.policy import Policy, find_policy, read_policy
from via_sd.runtime.generation.prompts import PROMPT_OPTIONS, Prompt, PromptEncoder, PromptOptions
from via_sd.runtime.generation.stream import CompletionStream
from via_sd.runtime.generation.text import Decoder

#: Time of a pass over S tokens in passes over one, by precision (measured with SmolLM2-135M on two x86-64 cores).
_DEFAULT_COST = {
    "fp32": {1: 1.0, 2: 1.13, 4: 1.15, 6: 1.18, 8: 1.33, 9: 1.41, 12: 1.48, 16: 1.72},
    "int8": {1: 1.0, 2: 1.15, 4: 1.5, 8: 2.1, 16: 3.3},
    "int4": {1: 1.0, 2: 1.27, 4: 1.8, 8: 2.7, 16: 4.5},
}
#: Share of a pass's time that its layers take (the rest is the LM head), where no calibration measured it.
_LAYER_SHARE = 0.8
#: Cost of one drafted token in plain steps, where no calibration measured this machine.
_MASK_DRAFTER_COST = 0.5
_MODEL_DRAFTER_COST = 0.35


@dataclass
class SequenceCaches:
    """KV of one sequence.

    Attributes:
        verifier: shared by all its tiers.
        drafter: a model drafter's own, None for other drafters.
        reused: prompt tokens the verifier's buffers held already.
        tokens: the sequence the buffers belong to; as long as it is empty they count as unknown.
    """

    verifier: SequenceCache
    drafter: SequenceCache | None
    reused: int
    tokens: list[int] = field(default_factory=list)


class Pipeline:
    """A loaded bundle.

    Thread-safe: every sequence runs in a KV slot of its own, and gives the same output as it would alone.
    """

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
        self.bundle = bundle
        self.tokenizer = _load_tokenizer(bundle)
        self.decoder = Decoder(self.tokenizer)
        self.verifier = verifier
        self._prompts = PromptEncoder(
            self.tokenizer,
            partial(_load_tokenizer, bundle),
            bundle.manifest["tokenizer"],
            verifier.vocab_size,
            verifier.max_seq_len,
        )
        self.eos_token_ids = frozenset(int(token) for token in bundle.manifest["tokenizer"]["eos_token_ids"])
        self.capacity = verifier.max_seq_len
        slim = bundle.masks.get(bundle.slim or "")
        self.policy = policy
        self.step_cost = StepCost(policy.full_cost if policy else _DEFAULT_COST[bundle.precision])
        self.slim_cost = 1 - _LAYER_SHARE * slim.skip_ratio if slim else 1.0
        if policy and policy.slim_cost is not None:
            self.slim_cost = policy.slim_cost
        self._pool = SlotPool(verifier, max_sequences, retained_slots)
        self.drafter = drafter
        # A sequence has its verifier slot before it asks for a drafter slot, so this one never waits.
        self._drafter_pool = SlotPool(drafter, max_sequences, retained_slots) if drafter else None
        self._slot_timeout = slot_timeout

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        backend: str = ONNXRUNTIME,
        threads: int | None = None,
        max_sequences: int = 8,
        retained_slots: int = 2,
        slot_timeout: float | None = None,
        verify: bool = True,
        trust_engines: bool = False,
        policy: str | Path | bool = True,
    ) -> Pipeline:
        """Load the bundle at `path`.

        Args:
            backend: what runs it, one of `BACKENDS`.
            threads: threads of one pass; the number of physical cores if None.
            max_sequences: sequences that may run at once; more wait for a slot.
            retained_slots: KV buffers kept when idle, so that a prompt that begins like a finished one skips that
                much prefill.
            slot_timeout: seconds a request waits for a slot before `BusyError`; None waits for as long as it takes.
            verify: compare the hash of every file with the manifest.
            trust_engines: run TensorRT engines that were not built on this machine.
            policy: take what `calibrate` left in the bundle for this machine, backend and number of threads, if it was
                run; or the file it wrote elsewhere; or nothing (False).

        Raises:
            BundleError: no bundle or policy, a damaged one, or no engine installed to run it.
        """
        bundle = load_bundle(path, verify=verify)
        if bundle.precision not in _DEFAULT_COST:
            raise BundleError(
                f"{bundle.path} has weights in {bundle.precision}, this runtime takes {', '.join(_DEFAULT_COST)}; "
                "export the bundle again in one of these"
            )
        found = None
        if policy is True:
            found = find_policy(bundle, backend, threads)
        elif policy:
            found = read_policy(Path(policy), bundle, backend)
        engine, drafter = open_engines(bundle, backend, threads=threads, trust_engines=trust_engines, verify=verify)
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

    # -- generation --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        cancel: threading.Event | None = None,
        **options: Any,
    ) -> Completion:
        """Generate to the end; see `stream`.

        Args:
            options: fields of `GenerationConfig` by name: `mode`, `max_new_tokens`, `temperature`, `seed`, `stop`, …;
                and of `PromptOptions`: `tools`, `chat_template_kwargs`, `continue_final_message`, …
        """
        stream = self.stream(prompt, config, cancel=cancel, **options)
        for _ in stream:
            pass
        return stream.completion

    def stream(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        cancel: threading.Event | None = None,
        **options: Any,
    ) -> CompletionStream:
        """Generate a chunk per round; the stream's `completion` is there when it has ended.

        While a long prompt is read, chunks without tokens come too, one for every `Engine.prefill_chunk` tokens.

        Args:
            prompt: a text, messages ({"role": …, "content": …}), or token ids.
            config: what is asked for; `options` are its fields by name, instead of it or on top of it, and those of
                `PromptOptions`.
            cancel: set from any thread to end after the round, or the chunk of the prompt, that is running.

        Raises:
            RequestError: bad options or prompt, or a mode this bundle lacks a tier for.
            BusyError: no KV slot came free in time.
        """
        known = vars(config or GenerationConfig())
        reading = {name: options.pop(name) for name in PROMPT_OPTIONS if name in options and name not in known}
        if unknown := sorted(set(options) - set(known)):
            names = ", ".join(dict.fromkeys((*known, *PROMPT_OPTIONS)))
            raise RequestError(f"no option is called {', '.join(unknown)}; options are {names}")
        wanted = GenerationConfig(**{**known, **options})
        tokens = self.encode(prompt, raw=wanted.raw, **reading)
        return CompletionStream(self, tokens, wanted, cancel or threading.Event())

    def resolve(self, config: GenerationConfig) -> GenerationConfig:
        """`config` with the mode that `auto` means here, and what goes with that where `config` is silent."""
        if config.mode == AUTO:
            meant: Mapping[str, Any] = {"mode": SPECULATIVE}
            if self.policy is not None:
                as_measured = config.temperature == 0 and config.repetition_penalty == 1
                meant = self.policy.options_for(config.max_divergence, as_measured=as_measured)
            open_ = {name: value for name, value in meant.items() if name == "mode" or getattr(config, name) is None}
            # Thresholds and the calibrated router exclude each other, and the request's wins.
            if (config.alpha1, config.alpha2) != (None, None) and open_.get("router") == CALIBRATED:
                del open_["router"]
            if config.router == CALIBRATED:
                open_ = {name: value for name, value in open_.items() if name not in ("alpha1", "alpha2")}
            config = replace(config, **open_)
        if config.mode in SLIM_MODES and self.bundle.slim is None:
            raise RequestError(
                f"mode {config.mode} needs a slim-verifier, and this bundle was exported without a mask; "
                "export it with --mask, or use mode speculative"
            )
        if config.mode == ROUTED and config.router == CALIBRATED:
            if self.policy is None or self.policy.router is None:
                raise RequestError(
                    "router calibrated needs a calibration that allowed some divergence, on this machine, with this "
                    "backend and the same number of threads (given or left open): via-sd-export calibrate "
                    "--max-divergence"
                )
            if config.max_divergence is None:
                config = replace(config, max_divergence=self.policy.router.max_divergence)
        return config

    def router(self, config: GenerationConfig) -> Router:
        """The router for a resolved `config`."""
        if config.mode != ROUTED or config.router != CALIBRATED:
            return Gates.of(config)
        assert self.policy is not None
        assert self.policy.router is not None
        assert config.max_divergence is not None
        return self.policy.router.gate(config.max_divergence)

    # -- what a stream takes from here ---------------------------------------------------------------------------------

    @contextmanager
    def caches(self, prompt: Sequence[int]) -> Iterator[SequenceCaches]:
        """KV of the verifier, and of a model drafter, for one sequence; given back at the end.

        Raises:
            BusyError: no slot came free in time.
        """
        with ExitStack() as leases:
            slot, reused = leases.enter_context(self._pool.lease(prompt, self._slot_timeout))
            caches = SequenceCaches(SequenceCache(slot.buffers, self.verifier, reused), None, reused)
            held = [(slot, caches.verifier)]
            if self._drafter_pool is not None and self.drafter is not None:
                slot, reused = leases.enter_context(self._drafter_pool.lease(prompt, None))
                caches.drafter = SequenceCache(slot.buffers, self.drafter, reused)
                held.append((slot, caches.drafter))
            try:
                yield caches
            finally:
                for slot, cache in held:
                    slot.tokens = caches.tokens[: cache.lengths[FULL]]

    def new_drafter(self, caches: SequenceCaches, processor: Processor, seed: int) -> Drafter:
        """The bundle's drafter for one sequence."""
        described = self.bundle.manifest["drafter"]
        width = self.verifier.vocab_size
        if described["kind"] == "ngram":
            return NgramDrafter()
        if described["kind"] == "mask":
            return ModelDrafter(
                caches.verifier,
                described["tier"],
                processor,
                seed,
                vocabulary=width,
                widths=(width, width),
                capacity=self.capacity,
                cost=self._draft_cost(_MASK_DRAFTER_COST),
            )
        if described["kind"] == "model" and caches.drafter is not None and self.drafter is not None:
            return ModelDrafter(
                caches.drafter,
                FULL,
                processor,
                seed,
                vocabulary=described["shared_vocab"],
                widths=(self.drafter.vocab_size, width),
                capacity=self.drafter.max_seq_len,
                cost=self._draft_cost(_MODEL_DRAFTER_COST),
            )
        raise BundleError(f"drafter kind {described['kind']!r} is not known; export the bundle with this release")

    def _draft_cost(self, default: float) -> float:
        return default if self.policy is None or self.policy.draft_cost is None else self.policy.draft_cost


def _load_tokenizer(bundle: Bundle) -> Tokenizer:
    file = bundle.file("tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise BundleError(f"{file} cannot be read: {error}; export the bundle again") from None
    # Left over from training in many a file; a prompt is neither cut in silence nor filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
