"""Every evaluation of a search, in order, counted and on disk: what makes a search resumable.

A search asks for masks one after the other and decides the next from what came back. Run again with the same settings
it asks for the same ones, so a search that was killed is continued by running it from the start and answering from the
ledger as long as that has answers. Plain JSON lines: one with what the costs depend on, then one for each evaluation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from via_sd.errors import MaskError
from via_sd.files import write_whole
from via_sd.masks.evaluator import Evaluator
from via_sd.masks.space import Masks, Selection

FORMAT = "via-sd-search"
VERSION = 2


@dataclass(frozen=True)
class Record:
    """One evaluation.

    Attributes:
        kind: why it was made (`random`, `bayes`, `probe`, …).
        selection: what the mask does otherwise than full, see the space; ascending.
        cost, agreement: see `Evaluation`.
    """

    kind: str
    selection: Selection
    cost: float
    agreement: float


class BudgetSpentError(Exception):
    """The search asked for one evaluation more than it may have."""


class Ledger:
    """Evaluates selections, at most `limit` of them; the same one twice counts once.

    Args:
        evaluator: says what a mask costs.
        space: what selections mean.
        limit: evaluations allowed, those read from disk included.
        settings: what else decides which masks are asked for, as JSON data.
        path: where the ledger is kept; nowhere if None.
        resume: answer from the file at `path`, if there is one, before evaluating.
        progress: called after each evaluation.

    Raises:
        MaskError: an unfinished ledger at `path` and no `resume`; one made with other settings, on another text or
            model; or one that cannot be read.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        space: Masks,
        limit: int,
        settings: Mapping[str, Any],
        *,
        path: Path | None = None,
        resume: bool = False,
        progress: Callable[[Record], None] = lambda _: None,
    ) -> None:
        self.space = space
        self.limit = limit
        self.records: list[Record] = []
        self._evaluator = evaluator
        self._progress = progress
        self._known: dict[Selection, Record] = {}
        self._recorded: list[Record] = []
        self._file: TextIO | None = None
        if path is not None:
            # Through JSON, so that what is compared with the file has what JSON makes of it.
            header = json.loads(
                json.dumps(
                    {"format": FORMAT, "version": VERSION, "settings": settings, "costs_of": dict(evaluator.identity)}
                )
            )
            self._open(path, header, resume)

    @property
    def left(self) -> int:
        """Evaluations that may still be made."""
        return self.limit - len(self.records)

    def cost(self, selection: Collection[int], kind: str) -> float:
        """Cost of the mask that `selection` makes.

        Raises:
            BudgetSpentError: it was not evaluated before and no evaluation is left.
        """
        chosen = tuple(sorted(selection))
        if chosen in self._known:
            return self._known[chosen].cost
        if not self.left:
            raise BudgetSpentError
        record = self._next(chosen, kind)
        self.records.append(record)
        self._known[chosen] = record
        self._progress(record)
        return record.cost

    def knows(self, selection: Collection[int]) -> bool:
        return tuple(sorted(selection)) in self._known

    def best(self) -> Record:
        """The cheapest complete mask; of equals the one that agrees most, then the first."""
        return min(self.complete(), key=lambda record: (record.cost, -record.agreement))

    def complete(self) -> list[Record]:
        """The evaluations of masks that are complete, see `Masks.is_complete`, in order."""
        return [record for record in self.records if self.space.is_complete(record.selection)]

    def close(self, *, finished: bool) -> None:
        """Close the file; a finished ledger may be overwritten by the next search."""
        if self._file is not None:
            if finished and len(self.records) >= len(self._recorded):
                self._write({"finished": True})
            self._file.close()
            self._file = None

    def _next(self, selection: Selection, kind: str) -> Record:
        if len(self.records) < len(self._recorded):
            record = self._recorded[len(self.records)]
            if (record.selection, record.kind) != (selection, kind):
                raise MaskError(
                    f"evaluation {len(self.records)} of the search is {record.kind} {record.selection}, this "
                    f"search asks for {kind} {selection}: another release made it; start again without --resume"
                )
            return record
        evaluation = self._evaluator.evaluate(self.space.mask(selection))
        record = Record(kind, selection, evaluation.cost, evaluation.agreement)
        self._write(asdict(record))
        return record

    def _open(self, path: Path, header: dict[str, Any], resume: bool) -> None:
        if not resume:
            refuse_unfinished(path)
        whole, lines = _read(path)
        if lines and resume:
            _check_header(path, lines[0], header)
            self._recorded = [
                Record(line["kind"], tuple(line["selection"]), line["cost"], line["agreement"])
                for line in lines[1:]
                if "kind" in line
            ]
            # What a kill left of a last line goes; so does the mark of the end.
            kept = sum(1 for line in lines if "finished" not in line)
            whole = whole[:kept]
        else:
            whole = [json.dumps(header)]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(f"{line}\n" for line in whole))
        self._file = path.open("a", encoding="utf-8")

    def _write(self, data: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(data) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())


def improvements(records: Iterable[Record], space: Masks) -> Iterator[tuple[int, Record]]:
    """Every evaluation that was the best so far of the complete masks of `space`, with its number from 1 on."""
    best = float("inf")
    for number, record in enumerate(records, start=1):
        if space.is_complete(record.selection) and record.cost < best:
            best = record.cost
            yield number, record


def recorded_settings(path: Path) -> dict[str, Any]:
    """The settings of the search in `path`; none if there is no such file. Raises `MaskError` for another file."""
    _, lines = _read(path)
    settings = lines[0].get("settings") if lines else None
    return settings if isinstance(settings, dict) else {}


def refuse_unfinished(path: Path) -> None:
    """Raise `MaskError` if `path` holds a search that was interrupted: a new one would overwrite its evaluations."""
    _, lines = _read(path)
    if lines and not lines[-1].get("finished"):
        raise MaskError(
            f"{path} is an unfinished search ({len(lines) - 1} evaluations): continue with --resume, or delete it"
        )


def _read(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Complete lines of a ledger, as text and decoded; empty if there is no file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return [], []
    except (OSError, UnicodeDecodeError) as error:
        raise MaskError(f"cannot read {path}: {error}") from None
    raw = text.split("\n")[:-1]
    try:
        lines = [json.loads(line) for line in raw]
        if lines and lines[0]["format"] != FORMAT:
            raise KeyError("format")
    except (json.JSONDecodeError, KeyError, TypeError):
        raise MaskError(f"{path} is not the ledger of a search; choose another --out, or delete it") from None
    return raw, lines


def _check_header(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for part in ("version", "settings", "costs_of"):
        if found.get(part) != wanted[part]:
            old, new = found.get(part), wanted[part]
            differing = [part]
            if isinstance(old, dict) and isinstance(new, dict):
                differing = [
                    f"{key} was {old.get(key)!r} and is {new.get(key)!r}"
                    for key in sorted({*old, *new})
                    if old.get(key) != new.get(key)
                ]
            raise MaskError(
                f"the search in {path} cannot be continued: {'; '.join(differing)}; use the same options, or delete it"
            )
