"""vision_attn: spatial multi-head attention for convolutional networks.

Axis names in einx and einsum expressions and in docstrings:

===  =====================================
b    batch
c    channels
h w  height and width of a feature map
n    heads (``h`` always means height)
m    key and value heads, if fewer than n
i    query token
j    key token
d    width of queries and keys in one head
e    width of values in one head
===  =====================================

Public names are imported on first use, so that importing the package is fast. ``__init__.pyi`` lists their modules.
"""

import lazy_loader

from vision_attn.version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
