"""A trained network as a file that others run: an ONNX or torch.export program, a folder of timm's, or weights."""
