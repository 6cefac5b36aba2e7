"""Attention into networks, out of them, and read from them.

Insertion, checkpoints, conversion of other libraries' layers, registered models, and what can be seen of a network.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["convert"])
