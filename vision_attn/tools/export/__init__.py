"""A trained network written as what others run: a graph of ONNX or torch.export."""
