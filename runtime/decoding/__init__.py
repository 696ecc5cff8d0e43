"""Decoding: from token ids to token ids, in modes that share one set of parts.

Begin with `modes/`, one generator function per decoding mode, written with `run.Run`. Drafters are in `drafters/`, the
lossless test in `verification.py`, the router in `router.py`; what a round costs and which way it goes, in
`cost_model.py` and `round_policy.py`. `tiered_model.py` puts the parts together for every sequence.
"""
