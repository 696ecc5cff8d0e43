"""The front door: requests and prompts in; streams, text and statistics out.

`pipeline.Pipeline` resolves a request (`resolve.py`) and makes a `stream.CompletionStream` for it, over the loaded
tiers and an `output.Output`; a stream runs a decoding mode and knows nothing of the pipeline.
"""
