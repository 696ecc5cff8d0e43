"""`via-sd-export chat`: a conversation at the terminal, each token coloured by the tier it came from."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from via_sd.errors import RequestError
from via_sd.runtime import Completion, GenerationConfig, Pipeline
from via_sd.tools.commands.console import CommandError, command, err, out
from via_sd.tools.commands.generation_options import with_generation_options
from via_sd.tools.commands.options import PipelineOptions, with_pipeline_options
from via_sd.tools.commands.tier_text import show, summary

HELP = """/stats  figures of the last answer, and of the KV buffers
/reset  forget the conversation
/quit   leave (so does Ctrl-D)
Ctrl-C ends an answer, or empties the line."""


class Conversation:
    """The messages so far, and the last answer.

    Every turn is read as one prompt with all before it; what the KV buffers hold of that is not read again.
    """

    def __init__(self, pipeline: Pipeline, config: GenerationConfig, system: str | None) -> None:
        self._pipeline, self._config = pipeline, config
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.last: Completion | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self._messages: list[dict[str, Any]] = list(self._system)

    def answer(self, text: str) -> None:
        """Print the answer to `text`, until its end or Ctrl-C, and keep both.

        Raises:
            RequestError: the conversation does not fit the KV buffers, or contradicts an option; nothing is kept.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        with _interrupts() as cancel:
            stream = self._pipeline.stream(messages, self._config, cancel=cancel)
            try:
                for chunk in stream:
                    show(chunk.pieces)
            finally:
                out.print()
        self.last = stream.completion
        self._messages = [*messages, {"role": "assistant", "content": self.last.text}]

    def print_stats(self) -> None:
        """Figures of the last answer."""
        if self.last is None:
            err.print("nothing was answered yet", highlight=False)
            return
        err.print(summary(self.last), highlight=False)
        used = self.last.prompt_tokens + len(self.last.token_ids)
        reused = self.last.stats.reused_prefix_tokens
        err.print(
            f"prompt of {self.last.prompt_tokens} tokens, {reused} of them in the KV buffers already; "
            f"{used} of {self._pipeline.capacity} positions used",
            highlight=False,
        )


@command
@with_generation_options
@with_pipeline_options
def chat(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.")],
    config: GenerationConfig,
    runtime: PipelineOptions,
    system: Annotated[str | None, typer.Option(help="System message in front of the conversation.")] = None,
) -> None:
    """Talk to BUNDLE at the terminal."""
    pipeline = runtime.load(bundle)
    if config.raw or not pipeline.has_chat_template:
        why = "--raw leaves the chat template out" if config.raw else f"{bundle} has no chat template"
        raise CommandError(f"{why}, which tells the turns of a conversation apart; use generate")
    pipeline.resolve(config)  # refused now rather than at the first line
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` a history and editing
    err.print("/help says what there is besides talking", highlight=False)
    conversation = Conversation(pipeline, config, system)
    for line in _lines():
        if line == "/help":
            err.print(HELP, highlight=False)
        elif line == "/stats":
            conversation.print_stats()
        elif line == "/reset":
            conversation.reset()
        elif line.startswith("/"):
            err.print(f"no command is called {line.split()[0]}; /help lists them", highlight=False, markup=False)
        else:
            try:
                conversation.answer(line)
            except RequestError as error:
                err.print(f"{error}; /reset forgets the conversation", highlight=False, markup=False)


def _lines() -> Iterator[str]:
    """What the user types, until the end of input or /quit."""
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            out.print()
            return
        except KeyboardInterrupt:
            out.print()
            continue
        if line == "/quit":
            return
        if line:
            yield line


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, instead of ending the program."""
    pressed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
