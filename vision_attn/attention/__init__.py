"""Attention on tensors: patterns, positions, implementations, and the blocks that are made of them.

Needs torch alone, and einx when it is first used.
"""
