"""Kill commands at moments spread over their run, and see that the next run clears up and comes to the same result.

    python -m tools.benchmarks.kills [COMMAND]… [--moments 20] [--seed 0]

Each command runs undisturbed first, which gives its duration and its result. Then it is ended by SIGKILL and by SIGTERM
at seeded moments of that duration; what SIGTERM leaves must be nothing, and after SIGKILL the same command must end
well, leave nothing but its result, and have a result equal to the undisturbed one. Commands run in forked children of
this process, in which everything slow is imported already.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tools.benchmarks.fuzz.readers import make_models
from via_sd.tools.commands.console import CheckFailedError, CommandError, command, out

#: Keys of results that differ between two undisturbed runs: what was timed.
_TIMED = {
    "measured",
    "costs",
    "build_seconds",
    "step_ratio",
    "step_ms",
    "auto",
    "exact",
    "router",
    "sha256",
    "xxh3",
    "size",
    "delta",
}


@dataclass(frozen=True)
class Killed:
    """A command that is killed.

    Attributes:
        arguments: of the command line, for a folder with a copy of what it works on.
        prepare: fills that folder.
        result: what it writes, by the path in the folder.
        ignored: names (ends) of written files that two runs make differently, and that are not compared.
        kept: files that stay on purpose when it is ended: what was evaluated, and what was complete.
    """

    arguments: Callable[[Path], Sequence[object]]
    prepare: Callable[[Path, Path], None]
    result: str
    ignored: tuple[str, ...] = ()
    kept: frozenset[str] = frozenset()


def _nothing(models: Path, folder: Path) -> None:
    del models, folder


def _prompts(models: Path, folder: Path) -> None:
    shutil.copytree(models / "bundle", folder / "bundle")
    (folder / "prompts.jsonl").write_text('{"prompt": "the thing of the other thing"}\n', encoding="utf-8")


def commands(models: Path) -> dict[str, Killed]:
    """The commands that write for long, over the tiny models in `models`."""
    checkpoint, bundle, mask = models / "checkpoint", models / "bundle", models / "masks" / "slim.json"
    found = {
        "export": Killed(
            lambda f: ("export", checkpoint, "--out", f / "out", "--mask", mask, "--max-seq-len", 256), _nothing, "out"
        ),
        "export-gguf": Killed(
            lambda f: ("export", models / "model.gguf", "--out", f / "out", "--precision", "int4", "--no-check"),
            _nothing,
            "out",
        ),
        "search": Killed(
            lambda f: (
                *("search", bundle, "--out", f / "mask.json", "--prompts", f / "prompts.jsonl", "--iterations", 12),
                *("--window", 32, "--threads", 1, "--resume"),
            ),
            _prompts,
            "",
            (".png",),
            frozenset(("mask.json", "mask.search.jsonl", "mask.png")),
        ),
        "calibrate": Killed(
            lambda f: (
                *("calibrate", f / "bundle", "--prompts", f / "prompts.jsonl", "--max-new-tokens", 8, "--repeats", 1),
                *("--threads", 1),
            ),
            _prompts,
            "bundle",
        ),
        "triton": Killed(lambda f: ("triton", bundle, "--repository", f / "repository"), _nothing, "repository"),
    }
    if find_spec("tensorrt_rtx") is not None:
        found["build"] = Killed(
            lambda f: ("build", f / "bundle", "--target", "tensorrt-rtx", "--dtype", "fp16"),
            _prompts,
            "bundle",
            (".log", ".plan"),
        )
    return found


@dataclass
class Counts:
    """What became of the kills of one command."""

    moments: int = 0
    ended_before: int = 0
    cleared: int = 0
    wrong: list[str] = field(default_factory=list)


def try_kills(killed: Killed, models: Path, work: Path, moments: int, seed: int) -> Counts:
    """Kill a command `moments` times with each signal, and run it again each time."""
    scratch = work / "temporary"
    scratch.mkdir(parents=True)
    folder = _fresh(work, killed, models)
    code, seconds, said = _run(killed.arguments(folder), scratch)
    if code:
        raise CommandError(f"the undisturbed command ended with {code}: {said[-400:]}")
    theirs = _names(scratch)  # what libraries leave in the temporary folder, killed or not
    wanted, counts, random_ = _facts(folder / killed.result, killed), Counts(), random.Random(seed)
    for number in range(moments):
        for ending in (signal.SIGKILL, signal.SIGTERM):
            counts.moments += 1
            moment = (number + random_.random()) / moments * seconds
            label = f"{ending.name} after {moment:.2f} of {seconds:.2f} s"
            folder = _fresh(work, killed, models)
            before = _names(folder)
            code, _, said = _run(killed.arguments(folder), scratch, moment, ending)
            counts.ended_before += code == 0
            left = sorted(_names(folder) - before - killed.kept) + sorted(_names(scratch) - theirs)
            if ending == signal.SIGTERM and code not in (0, -ending) and left:
                counts.wrong.append(f"{label}: left {', '.join(left[:3])}")
            if "Traceback" in said:
                counts.wrong.append(f"{label}: {said[-300:]}")
            if code == 0 or _facts(folder / killed.result, killed) == wanted:
                counts.ended_before += code != 0  # killed with its result complete, which a next run would refuse
                continue
            counts.cleared += bool(left)
            code, _, said = _run(killed.arguments(folder), scratch)
            if code:
                counts.wrong.append(f"{label}: run again, it ended with {code}: {said[-300:]}")
            elif rest := sorted(_names(scratch) - theirs) + [
                n for n in sorted(_names(folder)) if "partial" in n or "replaced" in n
            ]:
                counts.wrong.append(f"{label}: run again, it left {', '.join(rest[:3])}")
            elif (found := _facts(folder / killed.result, killed)) != wanted:
                differing = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
                counts.wrong.append(f"{label}: run again, {', '.join(differing[:3])} differ")
    return counts


def _fresh(work: Path, killed: Killed, models: Path) -> Path:
    folder = work / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    killed.prepare(models, folder)
    return folder


def _run(
    arguments: Sequence[object], scratch: Path, moment: float | None = None, ending: signal.Signals = signal.SIGKILL
) -> tuple[int, float, str]:
    """Run a command in a child; its exit code (negative: the signal), its seconds, and what it said."""
    log = scratch.parent / "said"
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _child([str(argument) for argument in arguments], scratch, log)
    if moment is not None:
        while (
            time.monotonic() - started < moment
            and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        ):
            time.sleep(0.002)
        os.kill(child, ending)  # a child that has ended is there until it is waited for
    _, status = os.waitpid(child, 0)
    seconds = time.monotonic() - started
    while _group_lives(child):  # a process that the killed one had started ends by itself
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(status), seconds, log.read_text(encoding="utf-8", errors="replace")


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _child(arguments: list[str], scratch: Path, log: Path) -> None:
    code = 99
    try:
        os.setsid()
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if number == 1 else os.O_APPEND)), number)
        os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        from via_sd.tools.commands.main import app

        app(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - whatever it is, the parent shall read it
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def _facts(result: Path, killed: Killed) -> dict[str, Any]:
    """What is compared of a result: names of its files, and their content but for what was timed."""
    facts: dict[str, Any] = {}
    for path in sorted(result.rglob("*")):
        if not path.is_file():
            continue
        name = path.relative_to(result).as_posix()
        if path.name.endswith(killed.ignored):
            facts[name] = None
        elif path.suffix in (".json", ".jsonl"):
            lines = (
                path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else [path.read_text("utf-8")]
            )
            facts[name] = [_untimed(json.loads(line)) for line in lines]
        else:
            facts[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return facts


def _untimed(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _untimed(value) for key, value in data.items() if key not in _TIMED}
    return [_untimed(each) for each in data] if isinstance(data, list) else data


@command
def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Of export, export-gguf, search, calibrate, triton, build.")
    ] = None,
    moments: Annotated[int, typer.Option(help="Kills with each signal, for each command.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
    models: Annotated[Path | None, typer.Option(help="Keep the tiny models in this folder.")] = None,
) -> None:
    """Kill commands, run them again, and compare; exit code 1 if anything was left or differed."""
    table = Table("command", "kills", "had ended", "had left something", "wrong")
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as root:
        made = make_models(models or Path(root) / "models")
        known = commands(made)
        if unknown := sorted(set(names or ()) - set(known)):
            raise CommandError(f"no command here is called {', '.join(unknown)}; there are {', '.join(known)}")
        if {"export", "export-gguf", "build"} & set(names or known):
            import mobius  # noqa: F401 - before the forks, rather than in each
            import transformers

            _ = transformers.LlamaForCausalLM
        for name in names or known:
            counts = try_kills(known[name], made, Path(root) / name, moments, seed)
            table.add_row(name, *map(str, (counts.moments, counts.ended_before, counts.cleared, len(counts.wrong))))
            wrong += [f"{name}: {each}" for each in counts.wrong]
    out.print(table)
    if wrong:
        raise CheckFailedError("; ".join(wrong))


if __name__ == "__main__":
    typer.run(main)
