"""VIA-SD speculative decoding, deployed: export bundles, run them, search masks, serve.

Names are imported when they are first used: `import via_sd` loads neither an engine nor the packages that an export
needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from via_sd.lazy import lazy_names

if TYPE_CHECKING:
    from via_sd.errors import ViaSdError
    from via_sd.export import export_bundle
    from via_sd.masks import Mask
    from via_sd.runtime import GenerationConfig, Pipeline, generate, load, stream
    from via_sd.version import __version__
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "GenerationConfig": "via_sd.runtime",
            "Mask": "via_sd.masks",
            "Pipeline": "via_sd.runtime",
            "ViaSdError": "via_sd.errors",
            "__version__": "via_sd.version",
            "export_bundle": "via_sd.export",
            "generate": "via_sd.runtime",
            "load": "via_sd.runtime",
            "stream": "via_sd.runtime",
        },
    )

__all__ = [
    "GenerationConfig",
    "Mask",
    "Pipeline",
    "ViaSdError",
    "__version__",
    "export_bundle",
    "generate",
    "load",
    "stream",
]
