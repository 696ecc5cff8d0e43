"""Compare what runs a bundle with transformers on the checkpoint it was exported from.

    from via_sd.tools.validation import validate

    found = validate("bundle", "model")
    for report in found.models["verifier"]:
        print(report.tier, report.passed, report.mean_kl)

Failures are `ValidationError`, `BundleError` and `ExportError`; a difference is no failure but a report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from via_sd.lazy import lazy_names

if TYPE_CHECKING:
    from via_sd.tools.validation.compare import OutputReport, TierReport, Tolerance
    from via_sd.tools.validation.run import Validation, validate
else:
    __getattr__ = lazy_names(
        __name__,
        {
            **dict.fromkeys(("OutputReport", "TierReport", "Tolerance"), "via_sd.tools.validation.compare"),
            **dict.fromkeys(("Validation", "validate"), "via_sd.tools.validation.run"),
        },
    )

__all__ = ["OutputReport", "TierReport", "Tolerance", "Validation", "validate"]
