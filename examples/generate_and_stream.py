"""Generate a text, then stream one.

python generate_and_stream.py BUNDLE
"""

import sys

import via_sd

# Load once: a pipeline serves any number of requests, from any number of threads.
pipeline = via_sd.load(sys.argv[1])

completion = pipeline.generate("Why do leaves change colour in autumn?", max_new_tokens=48)
print(completion.text)
print(f"ended by {completion.finish_reason}, {len(completion.token_ids)} tokens, by tier {completion.tiers}")

# A conversation goes through the model's chat template. The same seed gives the same text.
conversation = [
    {"role": "user", "content": "Name a river."},
    {"role": "assistant", "content": "The Danube."},
    {"role": "user", "content": "Name another."},
]
stream = pipeline.stream(conversation, temperature=0.7, top_p=0.9, seed=1, max_new_tokens=48)
for chunk in stream:
    print(chunk.text, end="", flush=True)
print(f"\n{stream.completion.finish_reason}")
