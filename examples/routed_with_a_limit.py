"""Decode with `routed`, and keep its divergence within a limit.

    python routed_with_a_limit.py BUNDLE

`routed` is approximate: some tokens are accepted by the slim-verifier alone. The full verifier
audits them when it catches up, and the router tightens when more of them than the limit differ from
what it would have chosen.
"""

import sys

import via_sd

pipeline = via_sd.load(sys.argv[1])
completion = pipeline.generate(
    "Write a short story about a lighthouse.",
    mode="routed",
    max_divergence=0.02,  # at most about 2 % of the tokens
    audit_tail=True,  # let the full verifier check the end of the text too
    max_new_tokens=96,
)
print(completion.text)

divergence = completion.stats.divergence
print(f"{divergence.checked} tokens accepted by slim alone were checked, {divergence.disagreed:g} differed")
