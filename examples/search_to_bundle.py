"""Search a mask, export with it, calibrate, and generate as the calibration found best.

    python search_to_bundle.py CHECKPOINT PROMPTS BUNDLE [SKIP_RATIO [EVALUATIONS]]

PROMPTS are JSON lines, {"prompt": ..., "bucket": ...}. It needs the extras `cpu`, `export` and `search`.
"""

import sys

from via_sd import export_bundle, load
from via_sd.tools.bench import read_prompts
from via_sd.tools.calibration import calibrate
from via_sd.tools.search import SearchOptions, search_masks

checkpoint, prompt_file, bundle = sys.argv[1:4]
skip_ratio = float(sys.argv[4]) if len(sys.argv) > 4 else 0.2
options = SearchOptions(iterations=int(sys.argv[5]) if len(sys.argv) > 5 else 200)
prompts = read_prompts(prompt_file)

texts = [prompt.text for prompt in prompts]
(found,) = search_masks(checkpoint, [skip_ratio], prompts=texts, options=options)
print(f"cost {found.point.cost:.3g} nats, same top-1 at {found.point.agreement:.0%} of positions")

export_bundle(checkpoint, bundle, masks=[found.mask], max_seq_len=512)
calibration = calibrate(bundle, prompts, max_divergence=0.02, max_new_tokens=32, repeats=1)
calibration.write()  # into the bundle, where a pipeline on this machine finds it
print(f"auto is {calibration.winner}. {calibration.verdict}")

completion = load(bundle).generate("Why is the sky blue?", max_new_tokens=32)  # in mode auto
print(completion.text)
