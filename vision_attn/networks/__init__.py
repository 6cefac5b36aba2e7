"""Attention in existing networks.

Insert blocks, load and save checkpoints, convert the layers of other libraries, register models, and capture attention.
"""
