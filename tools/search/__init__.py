"""Search the layers that a verifier can best do without, on ONNX Runtime.

`search_masks` goes from a verifier (checkpoint, GGUF file, ONNX decoder or bundle) to one `FoundMask` per skip ratio:
the mask, its figures, and every evaluation of the search.

    from via_sd.masks import write_mask
    from via_sd.tools.search import SearchOptions, search_masks

    for found in search_masks("model", [0.3, 0.45], prompts=["Why do leaves change colour?"]):
        print(found.point.cost, found.point.agreement, found.point.step_ratio)
        write_mask(found.mask, f"slim-{found.point.skip_ratio:g}.json")

Failures are `SearchError` and `MaskError`. Plots are drawn by `plot_search` and `plot_front`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from via_sd.lazy import lazy_names

if TYPE_CHECKING:
    from via_sd.tools.search.front import FrontPoint
    from via_sd.tools.search.plots import plot_front, plot_search
    from via_sd.tools.search.run import FoundMask, SearchOptions, recorded_costs, search_masks
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "FrontPoint": "via_sd.tools.search.front",
            **dict.fromkeys(("plot_front", "plot_search"), "via_sd.tools.search.plots"),
            **dict.fromkeys(
                ("FoundMask", "SearchOptions", "recorded_costs", "search_masks"), "via_sd.tools.search.run"
            ),
        },
    )

__all__ = ["FoundMask", "FrontPoint", "SearchOptions", "plot_front", "plot_search", "recorded_costs", "search_masks"]
