"""Mask search over ONNX Runtime: search graph, evaluator, calibration text, figures of what was found."""
