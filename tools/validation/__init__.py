"""Compare the tiers of a bundle with transformers."""
