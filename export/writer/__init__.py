"""From a decoder graph to a bundle: weights, tokenizer, manifest, and the check of what was written."""
