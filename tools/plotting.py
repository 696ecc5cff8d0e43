"""Plots go to files: matplotlib without a display."""

from __future__ import annotations

from typing import Any

from via_sd.errors import MissingPackageError


def pyplot() -> Any:
    """matplotlib's pyplot, drawing to files.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise MissingPackageError("plots need matplotlib: pip install 'via-sd-export[search]'") from None
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt
