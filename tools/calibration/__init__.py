"""Find what `auto` should mean on this machine: forward pass latency, router margins, the fastest mode.

    from via_sd.tools.bench import read_prompts
    from via_sd.tools.calibration import calibrate

    found = calibrate("bundle", read_prompts("prompts.jsonl"), max_divergence=0.02)
    print(found.winner, found.verdict)
    found.write()  # into the bundle, where a pipeline looks for it

Failures are `BundleError` and `RequestError`.
"""

from via_sd.tools.calibration.run import Calibration, calibrate

__all__ = ["Calibration", "calibrate"]
