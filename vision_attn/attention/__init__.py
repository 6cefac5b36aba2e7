"""Attention on tensors: patterns, position encodings, implementations, and the blocks built from them.

The package depends on torch only; einx is imported on first use.
"""
