"""vision_attn: spatial multi-head attention for convolutional networks.

The letters, in einx strings, einsum strings and docstrings alike:

===  =====================================
b    batch
c    channels
h w  height and width of a map
n    heads (``h`` never means heads)
m    key heads, where they are fewer
i    query token
j    key token
d    width of queries and keys in one head
e    width of values in one head
===  =====================================

Importing this package is light: a public name is imported when it is first used. ``__init__.pyi`` says from where.
"""

import lazy_loader

from vision_attn.version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
