"""A trained network opened again, and written as what others run: a graph (ONNX, torch.export), a folder, weights."""
