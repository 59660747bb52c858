"""Exports a trained model in forms that other programs read: timm, the Hugging Face hub, ONNX."""
