"""Export a checkpoint with a slim-verifier that skips the layers you name.

    python export_with_a_mask.py CHECKPOINT BUNDLE LAYER [LAYER ...]

It needs the extras `cpu` and `export`. A search finds better masks than a guess does: see
search_to_bundle.py.
"""

import json
import sys
from pathlib import Path

from via_sd import Mask, export_bundle, load

checkpoint, bundle, *skipped = sys.argv[1:]
num_layers = json.loads((Path(checkpoint) / "config.json").read_text())["num_hidden_layers"]
mask = Mask.from_layers([str(layer) not in skipped for layer in range(num_layers)])

# The bundle is compared with transformers before it is completed; it appears whole or not at all.
export_bundle(checkpoint, bundle, masks=[mask], max_seq_len=512)

completion = load(bundle).generate("Why is the sky blue?", mode="cascade", max_new_tokens=32)
slim_tokens = completion.tiers.count("slim")
print(f"slim skips {mask.skip_ratio:.0%} of the sublayers; it wrote {slim_tokens} tokens")
print(completion.text)
