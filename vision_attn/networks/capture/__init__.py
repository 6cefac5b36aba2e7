"""Attention maps of a network: record them in a forward pass, select and draw them."""
