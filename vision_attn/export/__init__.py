"""A trained network opened again, and written as what others run: a graph of ONNX or torch.export, a folder, weights."""
