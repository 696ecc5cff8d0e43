"""What a TensorRT library says during a build, kept for the log file and for error messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from via_sd.export.tensorrt.library import Library


class BuildLog:
    """Messages of one build, `INFO` and above (a build says tens of thousands of things below that)."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._errors: list[str] = []

    def note(self, text: str) -> None:
        """Add a line of our own."""
        self.lines.append(f"# {text}")

    def logger(self, library: Library) -> Any:
        """A logger for the library that writes here."""
        trt, log = library.module, self

        class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity == trt.ILogger.VERBOSE:
                    return
                log.lines.append(f"[{severity.name}] {message}")
                if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                    log._errors.append(message)

        return Logger()

    def last_error(self) -> str:
        """The last error, in one line and without advice on where to read on."""
        text = self._errors[-1] if self._errors else "it gave no reason"
        return " ".join(text.split())[:500]

    def write(self, path: Path) -> None:
        path.write_text("\n".join(self.lines) + "\n", encoding="utf-8")
