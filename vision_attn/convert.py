"""Layers and equations of other libraries.

:func:`from_layer` converts a layer. :func:`attention_equations`, :func:`projection_equation` and
:func:`attention_pattern` return the einsum equations of Keras and the pattern of its attention axes.
"""

from vision_attn.networks.convert import from_layer
from vision_attn.networks.convert.equations import attention_equations, attention_pattern, projection_equation

__all__ = ["attention_equations", "attention_pattern", "from_layer", "projection_equation"]
