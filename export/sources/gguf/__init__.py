"""GGUF files: read whole, every key and tensor accounted for, as a configuration, tensors and a tokenizer."""
