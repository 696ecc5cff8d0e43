"""Where a decoder graph comes from: a checkpoint, a GGUF file, another exporter's ONNX decoder."""
