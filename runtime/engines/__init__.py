"""What runs the graphs: the engine protocol, ONNX Runtime, portable graphs on any of its providers, TensorRT."""
