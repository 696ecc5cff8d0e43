"""Programs at a real terminal (a pseudo-terminal of the kernel's), as a user works with them."""

from __future__ import annotations

import os
import pty
import re
import select
import time

#: Seconds to wait for what the screen should show.
PATIENCE = 60.0


class Terminal:
    """A program at a terminal of its own, whose keys are pressed and whose screen is read."""

    def __init__(self, *command: str, columns: int = 200) -> None:
        self._printed = b""
        self._process, self._master = pty.fork()
        if self._process == 0:
            os.environ.update(TERM="xterm", COLUMNS=str(columns))
            os.execv(command[0], command)

    @property
    def printed(self) -> str:
        """All that was read so far, colours and the like included."""
        return self._printed.decode(errors="replace")

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def read_until(self, pattern: str) -> str:
        """What the screen shows until `pattern`, without colours and the like."""
        seen, deadline = b"", time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode(errors="replace"))
            if re.search(pattern, text):
                return text
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    byte = os.read(self._master, 1)  # what follows the pattern is left for the next
                except OSError:
                    break
                seen, self._printed = seen + byte, self._printed + byte
        raise AssertionError(f"{pattern!r} is not in {seen!r}")

    def exit_code(self) -> int:
        _, status = os.waitpid(self._process, 0)
        os.close(self._master)
        return os.waitstatus_to_exitcode(status)
