"""From a model to a bundle: frontend, graph passes, weights, manifest.

`export_bundle` and what it needs are imported when they are first asked for: writing a Triton model repository takes
none of the packages that exporting a model does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.lazy import lazy_names

if TYPE_CHECKING:
    from via_sd.export.writer.bundle import export_bundle
    from via_sd.export.writer.precision import PRECISIONS
else:
    _import = lazy_names(
        __name__,
        {"PRECISIONS": "via_sd.export.writer.precision", "export_bundle": "via_sd.export.writer.bundle"},
    )

    def __getattr__(name: str) -> Any:
        try:
            return _import(name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("via_sd"):
                raise
            raise ExportError(
                f"exporting needs {error.name}, which is not installed: pip install 'via-sd-export[export]'"
            ) from None


__all__ = ["PRECISIONS", "ExportError", "UnsupportedModelError", "export_bundle"]
