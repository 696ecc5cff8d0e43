"""Files that an engine reads while it runs: whether somebody has written into them since they were loaded.

ONNX Runtime maps weights into memory, so what is written into the file becomes part of the model; a file that becomes
shorter ends the process at the next access (SIGBUS). A bundle is replaced safely by renaming: the mapping keeps the old
file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from via_sd.errors import BundleError


class LoadedFiles:
    """Remembers what `files` are now."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._known = {file: file.stat() for file in files}

    def check(self) -> None:
        """Raise `BundleError` for a file that was written into; a file that another has taken the place of is fine."""
        for file, known in self._known.items():
            try:
                found = os.stat(file)
            except OSError:
                continue  # moved away or removed: the mapping keeps it
            same = (found.st_dev, found.st_ino) == (known.st_dev, known.st_ino)
            if same and (found.st_size, found.st_mtime_ns) != (known.st_size, known.st_mtime_ns):
                raise BundleError(
                    f"{file} was written into while it was loaded, so texts would be wrong; load the bundle again, and "
                    "replace bundles by renaming directories, not by overwriting files"
                )
