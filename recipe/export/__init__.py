"""What was trained, in the forms that other programs read: timm, the Hugging Face hub, ONNX."""
