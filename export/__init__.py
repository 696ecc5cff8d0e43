"""From a model to a bundle: frontend, graph passes, weights, manifest.

`export_bundle` and what it needs are imported when they are first asked for: writing a Triton model repository takes
none of the packages that exporting a model does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from via_sd.errors import ExportError, UnsupportedModelError

if TYPE_CHECKING:
    from via_sd.export.writer.bundle import PRECISIONS, export_bundle
else:

    def __getattr__(name: str) -> Any:
        if name not in ("PRECISIONS", "export_bundle"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            from via_sd.export.writer import bundle
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("via_sd"):
                raise
            raise ExportError(
                f"exporting needs {error.name}, which is not installed: pip install 'via-sd-export[export]'"
            ) from None
        return getattr(bundle, name)


__all__ = ["PRECISIONS", "ExportError", "UnsupportedModelError", "export_bundle"]
