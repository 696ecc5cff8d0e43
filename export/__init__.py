"""From a model to a bundle: frontend, graph passes, weights, manifest."""

from via_sd.export.bundle import PRECISIONS, export_bundle
from via_sd.export.errors import ExportError, UnsupportedModelError

__all__ = ["PRECISIONS", "ExportError", "UnsupportedModelError", "export_bundle"]
