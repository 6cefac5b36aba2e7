"""Attention in existing networks.

Insert blocks, load and save checkpoints, convert the layers of other libraries, register models, and capture attention.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["convert"])
